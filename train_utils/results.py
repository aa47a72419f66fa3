"""Ground truth and detections as plain arrays, and the files of detections."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any, Self

import msgspec
import numpy as np
from numpy import ndarray

from conf import TrainError
from data import Annotations
from data.errors import shown
from data.progress import log
from data.validate import TINY, ids_by_name, looks_like

# A row per detection. "class" counts from 0; "box_xywh" is left, top, width and height in pixels of
# the original image.
NUMBERS = [("image_id", "i8"), ("class", "i4")]
DETECTION = np.dtype([*NUMBERS, ("score", "f4"), ("box_xywh", "4f4")])
# The same from any system's results file, with the file's own numbers and order.
DETECTION_AS_READ = np.dtype([*NUMBERS, ("score", "f8"), ("box_xywh", "4f8")])
Detections = ndarray  # of dtype DETECTION, or DETECTION_AS_READ


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
        return cls(**{column.name: getattr(annotations, column.name) for column in fields(cls)})

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
    """A copy sorted by image, falling score, class, then box, so that only identical rows tie.

    A results file keeps its order, which decides between equal scores.
    """
    if detections.dtype == DETECTION_AS_READ:
        return detections
    left, top, width, height = detections["box_xywh"].T
    keys = (height, width, top, left, detections["class"], -detections["score"], detections["image_id"])
    return np.take(detections, np.lexsort(keys))


def to_coco_json(detections: Detections, category_ids: Sequence[int] | ndarray) -> list[dict[str, Any]]:
    """COCO's results format in canonical order; ``category_ids`` has the id of each class."""
    ordered = canonical_order(detections)
    images, boxes, scores = (ordered[name].tolist() for name in ("image_id", "box_xywh", "score"))
    categories = np.asarray(category_ids)[ordered["class"]].tolist()
    return [
        {"image_id": image, "category_id": category, "bbox": box, "score": score}
        for image, category, box, score in zip(images, categories, boxes, scores, strict=True)
    ]


def images_json(annotations: Annotations) -> dict[str, Any]:
    """The images and categories of a data set as COCO writes them."""
    images = []
    for index, number in enumerate(annotations.image_ids.tolist()):
        height, width = annotations.sizes[index].tolist()
        images.append({"id": number, "file_name": annotations.file_name(index), "height": height, "width": width})
    return {"images": images, "categories": categories_json(annotations.names, annotations.category_ids.tolist())}


def categories_json(names: Sequence[str], category_ids: Sequence[int]) -> list[dict[str, Any]]:
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
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The contents of COCO json files: images with categories, and detections as results.

    ``names`` and ``category_ids`` are those of the classes. Images are sorted by name and frame.
    Pictures have the ids of ``ids_by_name``; where there are video frames, all count 1, 2, ...
    """
    ordered = sorted(results, key=lambda result: (result.name, result.frame or 0))
    ids = list(range(1, len(ordered) + 1))
    if all(result.frame is None for result in ordered):
        ids = ids_by_name([result.name for result in ordered])
    images, detections = [], []
    for number, result in zip(ids, ordered, strict=True):
        height, width = result.size
        image = {"id": number, "file_name": result.name, "height": height, "width": width}
        if result.frame is not None:
            image["frame"] = result.frame
        images.append(image)
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

    ``image_ids`` and ``category_ids`` (in the order of the classes) are those of the data; with
    ``single_class`` all of these are class 0. Like pycocotools, this leaves out rows of other
    categories and keeps rows that repeat another one; the log says how many. Raises TrainError if
    the file is not such a file, or an image or all categories are not in the data.
    """
    rows = _read_rows(path, set(image_ids.tolist()))
    classes = {category: index for index, category in enumerate(np.asarray(category_ids).tolist())}
    kept = [row for row in rows if row.category_id in classes]
    seen = {row.category_id for row in rows}
    foreign = sorted(seen - classes.keys())
    if foreign:
        listed = ", ".join(map(str, foreign[:5]))
        if len(foreign) > 5:
            listed += ", ..."
        sentence = f"{len(rows) - len(kept)} of its {len(rows)} rows are of categories {listed}"
        # Counted from 0 or 1, and not as the data does, all rows are of other classes.
        if not kept or 0 in foreign or max(seen) <= len(classes):
            raise TrainError(f"detections={path}: {sentence}, not of the data. fix: the ids of the annotation file")
        log.warning(f"{path}: {sentence}, which the data does not have, and are left out")
    repeated = len(kept) - len({msgspec.structs.astuple(row) for row in kept})
    if repeated > 0:
        log.warning(f"{path}: {repeated} of its {len(kept)} rows repeat another one and count as wrong")
    table = np.array([(row.image_id, 0, row.score, row.bbox) for row in kept], DETECTION_AS_READ)
    if not single_class:
        table["class"] = [classes[row.category_id] for row in kept]
    return table


def _read_rows(path: Path, image_ids: set[int]) -> list[ResultRow]:
    try:
        rows = msgspec.convert(json.loads(path.read_bytes()), list[ResultRow], strict=False)
        for index, row in enumerate(rows):
            if not all(map(math.isfinite, (row.score, *row.bbox))):
                raise ValueError(f"score or bbox is not finite - at `$[{index}]`")
            if row.image_id not in image_ids:
                raise ValueError(f"image {row.image_id} is not in the data - at `$[{index}]`")
    except (OSError, ValueError, RecursionError, msgspec.ValidationError) as error:
        fix = "fix: a COCO results file, and the annotations that it was made for"
        raise TrainError(f"detections={path} cannot be read ({shown(str(error))}). {fix}") from error
    return rows


def warn_of_units(path: Path, detections: Detections, image_ids: ndarray, sizes: ndarray) -> None:
    """Warn if boxes cannot be [left, top, width, height] in pixels.

    ``sizes`` (N, 2) are heights and widths of the images of ``image_ids`` (N,).
    """
    if len(detections) == 0:
        return
    order = np.argsort(image_ids)
    sizes = sizes[order[np.searchsorted(image_ids, detections["image_id"], sorter=order)]]
    boxes = detections["box_xywh"]
    start, extent = np.hsplit(boxes, 2)
    beyond = (start + extent > sizes[:, ::-1] + 1).any(axis=1)
    other = looks_like(boxes, sizes, extent.prod(axis=1))
    if extent.max() < TINY:
        log.warning(f"warning: all boxes of {path} are below {TINY:g} pixels, as if they were fractions of the image")
    elif other is not None:
        log.warning(f"warning: the boxes of {path} look like {other}, and are read as [left, top, width, height]")
    elif beyond.mean() > 0.5:
        log.warning(
            f"warning: {beyond.sum():,} of {len(boxes):,} boxes of {path} reach out of their image, as if they were "
            "not [left, top, width, height] in pixels"
        )


def check_images(path: Path, of_data: dict[str, Any]) -> None:
    """Compare an ``images.json`` beside the results ``path`` with ``images_json`` of the data.

    Raises TrainError if they differ: then the ids of the results stand for other images or classes.
    """
    beside = path.with_name("images.json")
    if not beside.is_file():
        return
    try:
        theirs = json.loads(beside.read_bytes())
        images = {int(row["id"]): _describe(row) for row in theirs["images"]}
        categories = [{"id": int(row["id"]), "name": row["name"]} for row in theirs.get("categories", ())]
    except (OSError, AttributeError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TrainError(f"{beside} cannot be read ({error!r}). fix: move detections={path} elsewhere") from error
    known = {row["id"]: _describe(row) for row in of_data["images"]}
    for number, there in images.items():
        here = known.get(number, there)
        if here != there:
            raise TrainError(
                f"image {number} of {beside} is {there}, and {here} in the data. "
                f"fix: the data that detections={path} was made for"
            )
    ids = {row["name"]: row["id"] for row in of_data["categories"]}
    for category in categories:
        name = category["name"]
        # A class that the data calls otherwise may be the same.
        if category not in of_data["categories"] and name in ids:
            said = f"{shown(name)} is category {category['id']} in {beside} and {ids[name]} in the data"
            raise TrainError(f"{said}. fix: the data that it was made for, or weights with names=<its .json>")


def _describe(image: dict[str, Any]) -> str:
    return f"{PurePosixPath(image['file_name']).name} of {image['width']} x {image['height']} pixels"


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
    table = np.column_stack([result.detections["class"], boxes, result.detections["score"]])
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savetxt(path, table, "%d %.6f %.6f %.6f %.6f %.6f")


def file_names(names: Sequence[str], suffix: str) -> dict[str, str]:
    """Map distinct relative ``names`` to distinct ones with another suffix.

    ``a/b.jpg`` becomes ``a/b.txt``, but ``a/b.jpg.txt`` if there is another ``a/b``, as a .png.
    """
    stems = {name: str(PurePosixPath(name).with_suffix("")) for name in names}
    counts = Counter([*stems.values(), *names])
    return {name: (stem if counts[stem] == 1 else name) + suffix for name, stem in stems.items()}
