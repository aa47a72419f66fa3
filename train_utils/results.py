"""Ground truth and detections as plain arrays, and the files of detections."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from conf.errors import TrainError
from data.annotations_read import ids_by_name
from data.errors import shown
from data.validate import TINY, looks_like

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
    file_names: Sequence[str] = ()  # of the images, relative to their folder; none in older files

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
    Pictures have the ids of ``ids_by_name``; where there are video frames, all count 1, 2, ...
    """
    ordered = sorted(results, key=lambda result: (result.name, result.frame or 0))
    images, detections = [], []
    pictures = [result.name for result in ordered if result.frame is None]
    ids = ids_by_name(pictures) if len(pictures) == len(ordered) else range(1, len(ordered) + 1)
    for number, result in zip(ids, ordered, strict=True):
        height, width = result.size
        frame = {} if result.frame is None else {"frame": result.frame}
        images.append({"id": number, "file_name": result.name, "height": height, "width": width} | frame)
        rows = result.detections.copy()
        rows["image_id"] = number
        detections += to_coco_json(rows, category_ids)
    categories = [{"id": number, "name": name} for number, name in zip(category_ids, names, strict=True)]
    return {"images": images, "categories": categories}, detections


def read_results(
    path: Path,
    image_ids: np.ndarray,
    category_ids: Sequence[int] | np.ndarray,
    *,
    single_class: bool = False,
    warn: Callable[[str], object] = print,
) -> Detections:
    """Read a COCO results file: rows of dtype DETECTION_AS_READ.

    ``image_ids`` and ``category_ids`` (in the order of the classes) are those of the data; with
    ``single_class`` all of these are class 0. Like pycocotools, this leaves out rows of other
    categories and keeps rows that repeat another one; ``warn`` gets their numbers. Raises
    TrainError if the file is not such a file, or an image or all categories are not in the data.
    """
    images = set(image_ids.tolist())
    classes = {category: 0 if single_class else n for n, category in enumerate(np.asarray(category_ids).tolist())}
    rows, distinct, foreign, seen, where = [], set[tuple[float, ...]](), Counter[int](), set[int](), ""
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, list):
            raise ValueError("it is not a list of detections")
        for number, row in enumerate(content, start=1):
            where = f"row {number}: "
            image, category = _id(row, "image_id"), _id(row, "category_id")
            score, left, top, width, height = map(float, (row["score"], *row["bbox"]))
            if not np.isfinite((score, left, top, width, height)).all():
                raise ValueError(f"score {row['score']} or bbox {row['bbox']} is not finite")
            if image not in images:
                raise ValueError(f"its image {image} is not in the data")
            seen.add(category)
            if category in classes:
                rows.append((image, classes[category], score, (left, top, width, height)))
                distinct.add((image, category, score, left, top, width, height))
            else:
                foreign[category] += 1
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        reason = f"{where}{type(error).__name__}: {shown(str(error))}"
        fix = "fix: a COCO results file, and the annotations that it was made for"
        raise TrainError(f"detections={path} cannot be read ({reason}). {fix}") from error
    if foreign:
        listed = ", ".join(map(str, sorted(foreign)[:5])) + ", ..." * (len(foreign) > 5)
        sentence = f"{foreign.total()} of its {foreign.total() + len(rows)} rows are of categories {listed}"
        # Counted from 0 or 1, and not as the data does, all rows are of other classes.
        if not rows or 0 in foreign or max(seen) <= len(classes):
            raise TrainError(f"detections={path}: {sentence}, not of the data. fix: the ids of the annotation file")
        warn(f"{path}: {sentence}, which the data does not have, and are left out")
    if repeated := len(rows) - len(distinct):
        warn(f"{path}: {repeated} of its {len(rows)} rows repeat another one and count as wrong")
    return np.array(rows, dtype=DETECTION_AS_READ)


def warn_of_units(path: Path, detections: Detections, image_ids: np.ndarray, sizes: np.ndarray) -> None:
    """Print a warning if boxes cannot be [left, top, width, height] in pixels.

    ``sizes`` (N, 2) are heights and widths of the images of ``image_ids`` (N,).
    """
    order = np.argsort(image_ids)
    height, width = sizes[order[np.searchsorted(image_ids, detections["image_id"], sorter=order)]].T
    left, top, wide, high = detections["box_xywh"].T
    beyond = (left + wide > width + 1) | (top + high > height + 1)
    if len(detections) and max(wide.max(), high.max()) < TINY:
        print(f"warning: all boxes of {path} are below {TINY:g} pixels, as if they were fractions of the image")
    elif other := looks_like(detections["box_xywh"], np.column_stack([height, width]), wide * high):
        print(f"warning: the boxes of {path} look like {other}, and are read as [left, top, width, height]")
    elif len(detections) and beyond.mean() > 0.5:
        about = f"{beyond.sum():,} of {len(beyond):,} boxes of {path} reach out of their image"
        print(f"warning: {about}, as if they were not [left, top, width, height] in pixels")


def _id(row: Any, key: str) -> int:
    """An id of a results file; a number may be written as text. Raises ValueError for any other."""
    value = int(row[key]) if isinstance(row[key], str) and row[key].isdecimal() else row[key]
    if type(value) not in (int, float) or value % 1 or str(value) != str(row[key]):
        raise ValueError(f"its {key} is {'a text' if isinstance(value, str) else 'not a number'}: {shown(row[key])}")
    return int(value)


def check_images(
    path: Path, known: Mapping[int, tuple[str, tuple[int, int]]], categories: Collection[tuple[str, int]]
) -> None:
    """Compare an ``images.json`` beside the results ``path`` with the data.

    ``known`` are file name, and height and width, by image id, ``categories`` names and ids. Raises
    TrainError if they differ: then the ids of the results stand for other images or classes.
    """
    beside = path.with_name("images.json")
    try:
        content = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {"images": []}
        images, theirs = content["images"], [(row["name"], int(row["id"])) for row in content.get("categories", ())]
        rows = [(int(row["id"]), PurePosixPath(row["file_name"]).name, (row["height"], row["width"])) for row in images]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TrainError(f"{beside} cannot be read ({error!r}). fix: move detections={path} elsewhere") from error
    for number, name, size in rows:
        own, own_size = known.get(number, (name, size))
        if (name, size) != (PurePosixPath(own).name, own_size):
            raise TrainError(
                f"image {number} of {beside} is {name} of {size[1]} x {size[0]} pixels, and {own} of {own_size[1]} x "
                f"{own_size[0]} in the data. fix: the data that detections={path} was made for"
            )
    ids = dict(categories)
    for name, number in theirs:
        if (name, number) not in categories and name in ids:  # a class that the data calls otherwise may be the same
            said = f"{shown(name)} is category {number} in {beside} and {ids[name]} in the data"
            raise TrainError(f"{said}. fix: the data that it was made for, or weights with names=<its .json>")


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
