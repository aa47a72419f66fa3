"""Ground truth and detections as plain arrays, and the files of detections."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from conf.errors import TrainError

# A row per detection. "class" counts from 0; "box_xywh" is left, top, width and height in pixels of
# the original image.
DETECTION = np.dtype([("image_id", "i8"), ("class", "i4"), ("score", "f4"), ("box_xywh", "f4", (4,))])
# The same from any system's results file, with the file's own numbers and order.
DETECTION_AS_READ = np.dtype([("image_id", "i8"), ("class", "i4"), ("score", "f8"), ("box_xywh", "f8", (4,))])
Detections = np.ndarray  # of dtype DETECTION, or DETECTION_AS_READ


@dataclass(frozen=True)
class GroundTruth:
    """Annotations of N images with M boxes; image i has boxes ``offsets[i]:offsets[i + 1]``."""

    image_ids: np.ndarray  # int64 (N,)
    sizes: np.ndarray  # int (N, 2) height, width in pixels
    offsets: np.ndarray  # int64 (N + 1,)
    boxes_xywh: np.ndarray  # float64 (M, 4) left, top, width, height in pixels, as in the file
    classes: np.ndarray  # int (M,) from 0
    crowd: np.ndarray  # bool (M,)
    areas: np.ndarray  # float64 (M,) as in the file: of the mask, not of the box
    names: Sequence[str]  # of the classes, in the order of their category ids

    @property
    def image_of_box(self) -> np.ndarray:
        """Position of the image of each box, int64 (M,)."""
        return np.repeat(np.arange(len(self.image_ids)), np.diff(self.offsets))


def make_detections(image_id: int, classes: np.ndarray, scores: np.ndarray, boxes_xyxy: np.ndarray) -> Detections:
    """Detections of one image: classes (n,), scores (n,), boxes_xyxy (n, 4) in original pixels."""
    detections = np.zeros(len(classes), dtype=DETECTION)
    detections["image_id"], detections["class"], detections["score"] = image_id, classes, scores
    detections["box_xywh"][:, :2] = boxes_xyxy[:, :2]
    detections["box_xywh"][:, 2:] = boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]
    return detections


def to_xyxy(boxes_xywh: np.ndarray) -> np.ndarray:
    """Corners of boxes (n, 4)."""
    return np.concatenate([boxes_xywh[:, :2], boxes_xywh[:, :2] + boxes_xywh[:, 2:]], axis=1)


def canonical_order(detections: Detections) -> Detections:
    """A copy sorted by image, falling score, class, then box, so that only identical rows tie.

    A results file keeps its order, which decides between equal scores.
    """
    if detections.dtype == DETECTION_AS_READ:
        return detections
    left, top, width, height = detections["box_xywh"].T
    keys = (height, width, top, left, detections["class"], -detections["score"], detections["image_id"])
    return np.take(detections, np.lexsort(keys))


def to_coco_json(detections: Detections, category_ids: Sequence[int] | np.ndarray) -> list[dict[str, Any]]:
    """COCO's results format in canonical order; ``category_ids`` has the id of each class."""
    ordered = canonical_order(detections)
    columns = (ordered["image_id"], np.asarray(category_ids)[ordered["class"]], ordered["box_xywh"], ordered["score"])
    return [
        {"image_id": image_id, "category_id": category_id, "bbox": box_xywh, "score": confidence}
        for image_id, category_id, box_xywh, confidence in zip(*(c.tolist() for c in columns), strict=True)
    ]


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
    """The contents of COCO json files: images with categories, and detections as results.

    ``names`` and ``category_ids`` are those of the classes. Images are sorted by name and frame.
    """
    ordered = sorted(results, key=lambda result: (result.name, result.frame or 0))
    images, detections = [], []
    for number, result in zip(image_ids(ordered), ordered, strict=True):
        height, width = result.size
        frame = {} if result.frame is None else {"frame": result.frame}
        images.append({"id": number, "file_name": result.name, "height": height, "width": width} | frame)
        rows = result.detections.copy()
        rows["image_id"] = number
        detections += to_coco_json(rows, category_ids)
    categories = [{"id": number, "name": name} for number, name in zip(category_ids, names, strict=True)]
    return {"images": images, "categories": categories}, detections


def image_ids(results: Sequence[ImageResult]) -> list[int]:
    """The numbers in the file names, as in COCO (000000000139.jpg: 139), else 1, 2, ...

    Video frames are counted, as are names that are not distinct numbers below 2**53: a program may
    read JSON numbers as float64.
    """
    stems = [PurePosixPath(result.name).stem for result in results if result.frame is None]
    numbers = [int(stem) for stem in stems if stem.isdecimal() and int(stem) < 2**53]
    return numbers if len(set(numbers)) == len(results) else list(range(1, len(results) + 1))


def read_results(path: Path, image_ids: np.ndarray, category_ids: Sequence[int] | np.ndarray) -> Detections:
    """Read a COCO results file: rows of dtype DETECTION_AS_READ.

    ``image_ids`` and ``category_ids`` (in the order of the classes) are those of the data. Like
    pycocotools, this skips rows of other categories. Raises TrainError if it cannot be read, or if
    the data lacks an image or all categories.
    """
    images = set(image_ids.tolist())
    classes = {category: number for number, category in enumerate(np.asarray(category_ids).tolist())}
    try:
        content = [
            (row["image_id"], row["category_id"], row["score"], tuple(row["bbox"]))
            for row in json.loads(path.read_text(encoding="utf-8"))
        ]
        if foreign := [image for image, *_ in content if image not in images]:
            fix = "the annotations that these detections are for"
            raise TrainError(f"detections={path} names image {foreign[0]}, which the data lacks. fix: {fix}")
        rows = [(image, classes[category], *rest) for image, category, *rest in content if category in classes]
        detections = np.array(rows, dtype=DETECTION_AS_READ)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise TrainError(f"detections={path} cannot be read ({reason}). fix: a COCO results file") from error
    if content and not rows:
        raise TrainError(f"detections={path}: the data has none of its categories. fix: the ids of the annotation file")
    return detections


def write_json(path: Path, content: Any) -> None:
    """Write plain data as one JSON file."""
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def write_yolo(path: Path, result: ImageResult) -> None:
    """Write a line ``class cx cy w h score`` per detection, best first.

    Boxes are fractions of the picture's sides, classes count from 0. Without detections the file is
    empty.
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
