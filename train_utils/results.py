"""Ground truth and detections as plain arrays, and the files of detections."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any, Self

import msgspec
import numpy as np
from numpy import ndarray

from conf import TrainError
from data import Annotations
from data.errors import shown
from data.layouts import read_file
from data.progress import log
from data.validate import TINY, ids_by_name, looks_like

# A row per detection. "class" counts from 0; "box_xywh" is left, top, width and height in pixels of
# the original image.
NUMBERS = [("image_id", "i8"), ("class", "i4")]
DETECTION = np.dtype([*NUMBERS, ("score", "f4"), ("box_xywh", "4f4")])
# The same from any system's results file, with the file's own numbers and order.
DETECTION_AS_READ = np.dtype([*NUMBERS, ("score", "f8"), ("box_xywh", "4f8")])
Detections = ndarray  # of dtype DETECTION, or DETECTION_AS_READ
Json = dict[str, Any]  # an object of a file


@dataclass(frozen=True)
class GroundTruth:
    """Annotations of N images with M boxes; image i has boxes ``offsets[i]:offsets[i + 1]``."""

    image_ids: ndarray  # int64 (N,)
    sizes: ndarray  # int (N, 2) height, width in pixels
    offsets: ndarray  # int64 (N + 1,)
    boxes_xywh: ndarray  # float64 (M, 4) left, top, width, height in pixels, as in the file
    classes: ndarray  # int (M,) from 0
    crowd: ndarray  # bool (M,)
    areas: ndarray  # float64 (M,) as in the file: of the mask, not of the box
    names: Sequence[str]  # of the classes, in the order of their category ids
    file_names: Sequence[str] = ()  # of the images, relative to their folder; none in older files

    @classmethod
    def of(cls, annotations: Annotations) -> Self:
        """What the detections of a data set are scored against."""
        return cls(*attrgetter(*cls.__dataclass_fields__)(annotations))

    @property
    def image_of_box(self) -> ndarray:
        """Position of the image of each box, int64 (M,)."""
        return np.repeat(np.arange(len(self.image_ids)), np.diff(self.offsets))


def make_detections(image_id: int, classes: ndarray, scores: ndarray, boxes_xyxy: ndarray) -> Detections:
    """Detections of one image: classes (n,), scores (n,), boxes_xyxy (n, 4) in original pixels."""
    detections = np.zeros(len(classes), dtype=DETECTION)
    detections["image_id"] = image_id
    detections["class"] = classes
    detections["score"] = scores
    low, high = np.hsplit(boxes_xyxy, 2)
    detections["box_xywh"] = np.hstack([low, high - low])
    return detections


def to_xyxy(boxes_xywh: ndarray) -> ndarray:
    """Corners of boxes (n, 4)."""
    start, extent = np.hsplit(boxes_xywh, 2)
    return np.hstack([start, start + extent])


def canonical_order(detections: Detections) -> Detections:
    """A copy sorted by image, falling score, class, then box; a results file keeps its order."""
    if detections.dtype == DETECTION_AS_READ:
        return detections
    left, top, width, height = detections["box_xywh"].T
    keys = (height, width, top, left, detections["class"], -detections["score"], detections["image_id"])
    return np.take(detections, np.lexsort(keys))


def to_coco_json(detections: Detections, category_ids: Sequence[int] | ndarray) -> list[Json]:
    """COCO's results in canonical order; ``category_ids`` has the id of each class."""
    ordered = canonical_order(detections)
    images, boxes, scores = (ordered[name].tolist() for name in ("image_id", "box_xywh", "score"))
    categories = np.asarray(category_ids)[ordered["class"]].tolist()
    return [
        {"image_id": image, "category_id": category, "bbox": box, "score": score}
        for image, category, box, score in zip(images, categories, boxes, scores, strict=True)
    ]


def images_json(annotations: Annotations) -> Json:
    """The images and categories of a data set as COCO writes them."""
    images = []
    for number, name, size in zip(annotations.image_ids, annotations.file_names, annotations.sizes, strict=True):
        images.append(image_json(int(number), name, size.tolist()))
    return {"images": images, "categories": categories_json(annotations.names, annotations.category_ids.tolist())}


def image_json(number: int, name: str, size: Sequence[int]) -> Json:
    """An image of ``size`` (height, width) as COCO writes it."""
    return {"id": number, "file_name": name, "height": size[0], "width": size[1]}


def categories_json(names: Sequence[str], category_ids: Sequence[int]) -> list[Json]:
    """The categories as COCO writes them."""
    return [{"id": number, "name": name} for number, name in zip(category_ids, names, strict=True)]


@dataclass(frozen=True)
class ImageResult:
    """The detections on one picture or one frame of a video."""

    name: str  # of the file, relative to the source's folder
    frame: int | None  # number of a video's frame, from 1; None for a picture
    size: tuple[int, int]  # height and width in pixels
    detections: Detections  # image_id is assigned on writing


def coco_files(
    results: Sequence[ImageResult], names: Sequence[str], category_ids: Sequence[int]
) -> tuple[Json, list[Json]]:
    """Images with categories, and detections, for COCO json; with video frames ids count from 1."""
    ordered = sorted(results, key=lambda result: (result.name, result.frame or 0))
    ids = list(range(1, len(ordered) + 1))
    if {result.frame for result in ordered} <= {None}:
        ids = ids_by_name([result.name for result in ordered])
    images, detections = [], []
    for number, result in zip(ids, ordered, strict=True):
        of_video = {} if result.frame is None else {"frame": result.frame}
        images.append(image_json(number, result.name, result.size) | of_video)
        rows = result.detections.copy()
        rows["image_id"] = number
        detections += to_coco_json(rows, category_ids)
    return {"images": images, "categories": categories_json(names, category_ids)}, detections


class ResultRow(msgspec.Struct):
    """A row of a COCO results file."""

    image_id: int
    category_id: int
    bbox: tuple[float, float, float, float]
    score: float


def read_results(
    path: Path, image_ids: ndarray, category_ids: Sequence[int] | ndarray, *, single_class: bool = False
) -> Detections:
    """Read a COCO results file, whose numbers may be texts: rows of dtype DETECTION_AS_READ.

    With ``single_class`` all ``category_ids`` are class 0. Like pycocotools, this leaves out rows
    of other categories and keeps those that repeat one; the log says how many. Raises TrainError.
    """
    try:
        rows = msgspec.convert(json.loads(read_file(path)), list[ResultRow], strict=False)
        table = np.array([(row.image_id, 0, row.score, row.bbox) for row in rows], DETECTION_AS_READ)
        categories = np.array([row.category_id for row in rows], np.int64)
        in_data = np.isin(table["image_id"], image_ids)
        finite = np.isfinite(np.column_stack((table["score"], table["box_xywh"]))).all(1)
        if not finite.all():
            raise ValueError(f"score or bbox is not finite - at `$[{finite.argmin()}]`")
        if not in_data.all():
            row = in_data.argmin()
            raise ValueError(f"image {table['image_id'][row]} is not in the data - at `$[{row}]`")
    except (OSError, ValueError, OverflowError, RecursionError, msgspec.ValidationError) as error:
        fix = "a COCO results file, and the annotations that it was made for"
        raise TrainError(f"detections={path} cannot be read ({shown(str(error))})", fix) from error
    ids = np.asarray(category_ids)
    is_known = np.isin(categories, ids)
    kept = table[is_known]
    foreign = np.unique(categories[~is_known]).tolist()
    if foreign:
        listed = ", ".join(map(str, foreign[:5])) + ", ..." * (len(foreign) > 5)
        sentence = f"{len(table) - len(kept)} of its {len(table)} rows are of categories {listed}"
        # Counted from 0 or 1, and not as the data does, all rows are of other classes.
        if len(kept) == 0 or 0 in foreign or categories.max() <= len(ids):
            raise TrainError(f"detections={path}: {sentence}, not of the data", "the ids of the annotation file")
        log.warning(f"{path}: {sentence}, which the data does not have, and are left out")
    order = np.argsort(ids)
    kept["class"] = order[np.searchsorted(ids, categories[is_known], sorter=order)]
    repeated = len(kept) - len(np.unique(kept.view(f"V{kept.itemsize}")))
    if repeated > 0:
        log.warning(f"{path}: {repeated} of its {len(kept)} rows repeat another one and count as wrong")
    if single_class:
        kept["class"] = 0
    return kept


def warn_of_units(path: Path, detections: Detections, image_ids: ndarray, sizes: ndarray) -> None:
    """Warn of boxes that cannot be [left, top, width, height] in pixels; ``sizes`` (N, 2)."""
    if len(detections) == 0:
        return
    order = np.argsort(image_ids)
    sizes = sizes[order[np.searchsorted(image_ids, detections["image_id"], sorter=order)]]
    boxes = detections["box_xywh"]
    start, extent = np.hsplit(boxes, 2)
    beyond = (start + extent > sizes[:, ::-1] + 1).any(1)
    other = looks_like(boxes, sizes, extent.prod(1))
    if extent.max() < TINY:
        log.warning(f"warning: all boxes of {path} are below {TINY:g} pixels, as if they were fractions of the image")
    elif other is not None:
        log.warning(f"warning: the boxes of {path} look like {other}, and are read as [left, top, width, height]")
    elif beyond.mean() > 0.5:
        log.warning(
            f"warning: {beyond.sum():,} of {len(boxes):,} boxes of {path} reach out of their image, "
            "as if they were not [left, top, width, height] in pixels"
        )


def check_images(path: Path, of_data: Json) -> None:
    """Raise TrainError if an ``images.json`` beside the results differs from the data's."""
    beside = path.with_name("images.json")
    if not beside.is_file():
        return
    try:
        theirs = json.loads(beside.read_bytes())
        images = {int(row["id"]): _describe(row) for row in theirs["images"]}
        categories = {row["name"]: int(row["id"]) for row in theirs.get("categories", ())}
    except (OSError, AttributeError, ArithmeticError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TrainError(f"{beside} cannot be read ({error!r})", f"move detections={path} elsewhere") from error
    for row in of_data["images"]:
        here, there = _describe(row), images.get(row["id"])
        if there not in (None, here):
            said = f"image {row['id']} of {beside} is {there}, and {here} in the data"
            raise TrainError(said, f"the data that detections={path} was made for")
    for row in of_data["categories"]:
        # A class that the data calls otherwise may be the same.
        number = categories.get(row["name"], row["id"])
        if {"id": number, "name": row["name"]} not in of_data["categories"]:
            said = f"{shown(row['name'])} is category {number} in {beside} and {row['id']} in the data"
            raise TrainError(said, "the data that it was made for, or weights with names=<its .json>")


def _describe(image: Json) -> str:
    return f"{PurePosixPath(image['file_name']).name} of {int(image['width'])} x {int(image['height'])} pixels"


def write_json(path: Path, content: Any) -> None:
    """Write plain data as one JSON file."""
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def write_yolo(path: Path, result: ImageResult) -> None:
    """Write a line ``class cx cy w h score`` per detection; boxes are fractions of the sides."""
    height, width = result.size
    boxes = result.detections["box_xywh"].astype(np.float64)
    boxes[:, :2] += boxes[:, 2:] / 2
    boxes /= [width, height, width, height]
    table = np.column_stack([result.detections["class"], boxes, result.detections["score"]])
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savetxt(path, table, "%d %.6f %.6f %.6f %.6f %.6f")


def file_names(names: Sequence[str], suffix: str) -> dict[str, str]:
    """Names with another suffix: a/b.jpg gives a/b.txt, or a/b.jpg.txt if there is a/b.png."""
    stems = {name: str(PurePosixPath(name).with_suffix("")) for name in names}
    counts = Counter([*stems.values(), *names])
    return {name: (stem if counts[stem] == 1 else name) + suffix for name, stem in stems.items()}
