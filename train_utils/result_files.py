"""Detections as files that other programs read: COCO results (json) and YOLO labels (txt)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from train_utils.coco_eval import Detections, to_coco_json
from train_utils.errors import TrainError


@dataclass(frozen=True)
class ImageResult:
    """What was found on one picture, or one frame of a video."""

    name: str  # of the file, relative to the source's folder
    frame: int | None  # number of a video's frame, from 1; None: a picture
    size: tuple[int, int]  # height and width in pixels
    detections: Detections  # their image_id is chosen when they are written


def coco_files(
    results: Sequence[ImageResult], names: Sequence[str], category_ids: Sequence[int]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The two COCO json objects: images with categories, and detections in the results format that refer to them.

    ``names`` and ``category_ids`` are those of the classes. Images are in the order of their names and frames; see
    ``image_ids`` for their numbers.
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
    """The numbers that the pictures' file names are, as COCO's (000000000139.jpg: 139); where not every name is a
    number of its own, or there are frames of videos, 1, 2, ... in order."""
    stems = [PurePosixPath(result.name).stem for result in results]
    if all(result.frame is None for result in results) and all(stem.isdecimal() for stem in stems):
        numbers = [int(stem) for stem in stems]
        if len(set(numbers)) == len(numbers):
            return numbers
    return list(range(1, len(results) + 1))


def write_json(path: Path, content: Any) -> None:
    """Write plain data as one JSON file. Raises TrainError where that cannot be done."""
    _write(path, json.dumps(content) + "\n")


def write_yolo(path: Path, result: ImageResult) -> None:
    """Write a line ``class cx cy w h score`` for each detection, best first, boxes as fractions of the picture's sides.

    Classes count from 0. A picture without detections has an empty file. Raises TrainError where it cannot be written.
    """
    height, width = result.size
    boxes = result.detections["box_xywh"].astype(np.float64)
    boxes[:, :2] += boxes[:, 2:] / 2
    boxes /= [width, height, width, height]
    columns = zip(result.detections["class"].tolist(), boxes.tolist(), result.detections["score"].tolist(), strict=True)
    lines = [" ".join([str(cls), *(f"{value:.6f}" for value in (*box, score))]) + "\n" for cls, box, score in columns]
    _write(path, "".join(lines))


def file_names(names: Sequence[str], suffix: str) -> dict[str, str]:
    """For each of the relative ``names``, all different, one with another suffix, all different too.

    ``a/b.jpg`` becomes ``a/b.txt``, but ``a/b.jpg.txt`` where ``a/b.png`` or the like is among them.
    """
    stems = {name: str(PurePosixPath(name).with_suffix("")) for name in names}
    counts = Counter([*stems.values(), *names])
    return {name: (stem if counts[stem] == 1 else name) + suffix for name, stem in stems.items()}


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TrainError(
            f"cannot write {path} ({error.strerror}). fix: look for free space, or another out="
        ) from error
