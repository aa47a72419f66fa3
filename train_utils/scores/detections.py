"""Ground truth and detections as plain arrays, their canonical order and their wire format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

# A row per detection. "class" counts from 0; "box_xywh" is left, top, width and height in pixels of
# the original image.
DETECTION = np.dtype([("image_id", "i8"), ("class", "i4"), ("score", "f4"), ("box_xywh", "f4", (4,))])
# The same from any system's results file, with the file's own numbers and order.
DETECTION_AS_READ = np.dtype([("image_id", "i8"), ("class", "i4"), ("score", "f8"), ("box_xywh", "f8", (4,))])
Detections: TypeAlias = np.ndarray  # of dtype DETECTION, or DETECTION_AS_READ

# The wire format, 26 bytes: "image" is the position in the data set.
PACKED = np.dtype([("image", "<u4"), ("class", "<u2"), ("score", "<f4"), ("box_xywh", "<f4", (4,))])
MAX_CLASSES = 2**16  # what PACKED can hold


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

    def boxes_xyxy(self, rows: np.ndarray) -> np.ndarray:
        """Corners of some boxes, float64 (n, 4) in pixels."""
        boxes = self.boxes_xywh[rows]
        return np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)


def make_detections(image_id: int, classes: np.ndarray, scores: np.ndarray, boxes_xyxy: np.ndarray) -> Detections:
    """Detections of one image: classes (n,), scores (n,), boxes_xyxy (n, 4) in original pixels."""
    detections = np.zeros(len(classes), dtype=DETECTION)
    detections["image_id"] = image_id
    detections["class"] = classes
    detections["score"] = scores
    detections["box_xywh"][:, :2] = boxes_xyxy[:, :2]
    detections["box_xywh"][:, 2:] = boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]
    return detections


def boxes_xyxy_of(detections: Detections) -> np.ndarray:
    """Corners of the boxes, float (n, 4) in pixels."""
    boxes = detections["box_xywh"]
    return np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)


def pack(detections: Detections) -> np.ndarray:
    """Convert to dtype PACKED; here ``image_id`` holds positions in the data set, not ids."""
    packed = np.empty(len(detections), dtype=PACKED)
    packed["image"] = detections["image_id"]
    for name in ("class", "score", "box_xywh"):
        packed[name] = detections[name]
    return packed


def unpack(packed: np.ndarray, image_ids: np.ndarray) -> Detections:
    """Undo ``pack``, with the ids (N,) of the data set's images in place of the positions."""
    detections = np.empty(len(packed), dtype=DETECTION)
    detections["image_id"] = image_ids[packed["image"]]
    for name in ("class", "score", "box_xywh"):
        detections[name] = packed[name]
    return detections


def canonical_order(detections: Detections) -> Detections:
    """Sort a copy by image, falling score, class, then box, so that only identical rows tie.

    Rows of a results file keep their order, which decides between equal scores. Few rows share
    image and score, so all are sorted by these two as one integer, and only ties by the rest. That
    takes a quarter of the time of a sort by all columns.
    """
    if detections.dtype == DETECTION_AS_READ:
        return detections
    images = detections["image_id"]
    if not len(images) or int(images.max()) - int(images.min()) >= 2**32:
        return np.take(detections, _order_by_all(detections))
    key = (images - images.min()).astype(np.uint64) << np.uint64(32) | _falling(detections["score"])
    order = np.argsort(key)
    ordered, key = detections[order], key[order]
    same = key[1:] == key[:-1]
    tied = np.flatnonzero(np.concatenate([[False], same]) | np.concatenate([same, [False]]))
    # Groups of ties stay in place: image and score come first in both sorts.
    ordered[tied] = ordered[tied[_order_by_all(ordered[tied])]]
    return ordered


def to_coco_json(detections: Detections, category_ids: Sequence[int] | np.ndarray) -> list[dict[str, Any]]:
    """COCO's results format, in canonical order; ``category_ids`` gives the id of each class."""
    ordered = canonical_order(detections)
    columns = (ordered["image_id"], np.asarray(category_ids)[ordered["class"]], ordered["box_xywh"], ordered["score"])
    return [
        {"image_id": image_id, "category_id": category_id, "bbox": box_xywh, "score": confidence}
        for image_id, category_id, box_xywh, confidence in zip(*(c.tolist() for c in columns), strict=True)
    ]


def _order_by_all(detections: Detections) -> np.ndarray:
    left, top, width, height = detections["box_xywh"].T
    return np.lexsort((height, width, top, left, detections["class"], -detections["score"], detections["image_id"]))


def _falling(scores: np.ndarray) -> np.ndarray:
    """Integers below 2**32 that order float32 scores from high to low.

    IEEE numbers sort by their bits, negative ones in reverse. Adding zero turns -0 into 0.
    """
    bits = (scores + np.float32(0)).view(np.uint32)
    return np.where(bits >> 31 == 1, bits, ~(bits | np.uint32(2**31))).astype(np.uint64)
