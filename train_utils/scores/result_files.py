"""Detections as files for other programs: COCO results (json) and YOLO labels (txt)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from train_utils.errors import TrainError
from train_utils.scores.detections import DETECTION_AS_READ, Detections, to_coco_json


@dataclass(frozen=True)
class ImageResult:
    """The detections on one picture or one frame of a video."""

    name: str  # of the file, relative to the source's folder
    frame: int | None  # number of a video's frame, from 1; None for a picture
    size: tuple[int, int]  # height and width in pixels
    detections: Detections  # image_id is assigned on writing


def coco_files(
    results: Sequence[ImageResult], names: Sequence[str], category_ids: Sequence[int]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Make the COCO json objects: images with categories, and detections in the results format.

    ``names`` and ``category_ids`` are those of the classes. Images are sorted by name and frame;
    ``image_ids`` gives their ids.
    """
    ordered = sorted(results, key=lambda result: (result.name, result.frame or 0))
    images, detections = [], []
    for number, result in zip(image_ids(ordered), ordered, strict=True):
        height, width = result.size
        frame = {} if result.frame is None else {"frame": result.frame}
        images.append({"id": number, "file_name": result.name, "height": height, "width": width} | frame)
        found = result.detections.copy()
        found["image_id"] = number
        detections += to_coco_json(found, category_ids)
    categories = [{"id": number, "name": name} for number, name in zip(category_ids, names, strict=True)]
    return {"images": images, "categories": categories}, detections


def image_ids(results: Sequence[ImageResult]) -> list[int]:
    """The numbers in the file names, as in COCO (000000000139.jpg: 139), else 1, 2, ...

    They are counted if there are video frames, or names that are not distinct numbers below 2**53,
    up to which programs that read numbers of a JSON as float64 keep them exactly.
    """
    stems = [PurePosixPath(result.name).stem for result in results]
    if all(result.frame is None for result in results) and all(stem.isdecimal() for stem in stems):
        numbers = [int(stem) for stem in stems]
        if len(set(numbers)) == len(numbers) and all(number < 2**53 for number in numbers):
            return numbers
    return list(range(1, len(results) + 1))


def read_results(path: Path, image_ids: np.ndarray, category_ids: Sequence[int] | np.ndarray) -> tuple[Detections, int]:
    """Read a COCO results file: rows of dtype DETECTION_AS_READ, and how many do not count.

    ``image_ids`` and ``category_ids`` (in the order of the classes) are those of the data. Like
    pycocotools, this skips rows of other categories. Raises TrainError if the file is none, or if
    an image is not in the data.
    """
    images = set(image_ids.tolist())
    classes = {category: number for number, category in enumerate(np.asarray(category_ids).tolist())}
    try:
        content = [
            (row["image_id"], row["category_id"], row["score"], tuple(row["bbox"]))
            for row in json.loads(path.read_text(encoding="utf-8"))
        ]
        if foreign := [image for image, *_ in content if image not in images]:
            raise TrainError(
                f"detections={path} names image {foreign[0]}, which the data does not have. fix: the annotations that "
                "these detections were made for"
            )
        rows = [(image, classes[category], *found) for image, category, *found in content if category in classes]
        detections = np.array(rows, dtype=DETECTION_AS_READ)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise TrainError(f"detections={path} cannot be read ({reason}). fix: a COCO results file") from error
    if content and not rows:
        raise TrainError(f"detections={path}: the data has none of its categories. fix: the ids of the annotation file")
    return detections, len(content) - len(rows)


def write_json(path: Path, content: Any) -> None:
    """Write plain data as one JSON file."""
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def write_yolo(path: Path, result: ImageResult) -> None:
    """Write a line ``class cx cy w h score`` per detection, best first.

    Boxes are fractions of the picture's sides; classes count from 0. A picture without detections
    gets an empty file.
    """
    height, width = result.size
    boxes = result.detections["box_xywh"].astype(np.float64)
    boxes[:, :2] += boxes[:, 2:] / 2
    boxes /= [width, height, width, height]
    columns = zip(result.detections["class"].tolist(), boxes.tolist(), result.detections["score"].tolist(), strict=True)
    lines = [" ".join([str(cls), *(f"{value:.6f}" for value in (*box, score))]) + "\n" for cls, box, score in columns]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")


def file_names(names: Sequence[str], suffix: str) -> dict[str, str]:
    """Map distinct relative ``names`` to distinct ones with another suffix.

    ``a/b.jpg`` becomes ``a/b.txt``, but ``a/b.jpg.txt`` if there is another ``a/b``, as a .png.
    """
    stems = {name: str(PurePosixPath(name).with_suffix("")) for name in names}
    counts = Counter([*stems.values(), *names])
    return {name: (stem if counts[stem] == 1 else name) + suffix for name, stem in stems.items()}
