"""A data set in a few figures, from its index alone: no file is opened."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data.audit.anchor_fit import Sizes, best_overlaps
from data.index.annotations import Annotations

SAMPLED_BOXES = 200_000  # the overlaps of so many with nine anchors take a tenth of a second
LOW_RECALL = 0.98


@dataclass(frozen=True)
class SetSummary:
    """What a training says about each of its sets before it starts."""

    images: int
    boxes: int
    classes: int
    empty_images: int  # without a box that training learns from
    min_iou: float | None  # None: the loss gives each box its best anchor, however little they overlap
    overlap: float  # recall: share of the boxes that overlap some anchor by more than min_iou;
    # without min_iou the mean IoU of a box with its best anchor; NaN where there are no boxes

    def line(self) -> str:
        """All of it in one line."""
        empty = f" ({self.empty_images:,} without boxes)" if self.empty_images else ""
        counts = f"{self.images:,} images{empty}, {self.boxes:,} boxes, {self.classes} classes"
        if not self.overlap >= 0:
            return counts
        if self.min_iou is None:
            return f"{counts}, mean IoU with the best anchor {self.overlap:.3f}"
        return f"{counts}, recall of the anchors {self.overlap:.4f} at IoU {self.min_iou:g}"

    def warning(self) -> str | None:
        """A sentence where the anchors miss so many boxes that better ones are worth the search."""
        if self.min_iou is None or not self.overlap < LOW_RECALL:
            return None
        return (
            f"warning: {1 - self.overlap:.1%} of the boxes overlap no anchor by more than {self.min_iou:g} and are "
            "learnt from as background only. fix: find anchors with python -m scripts.anchors"
        )


def summarise(annotations: Annotations, image_size: int, anchors: Sizes, min_iou: float | None) -> SetSummary:
    """Counts, and how anchors (k, 2) fit the boxes of images letterboxed to a square of ``image_size`` pixels.

    Of sets with many boxes the overlaps are those of a sample, spread evenly over the set.
    """
    overlaps = best_overlaps(_sampled_sizes(annotations, image_size), anchors)
    values = overlaps if min_iou is None else overlaps > min_iou
    return SetSummary(
        images=len(annotations),
        boxes=len(annotations.classes),
        classes=len(annotations.names),
        empty_images=int((objects_per_image(annotations) == 0).sum()),
        min_iou=min_iou,
        overlap=float(values.mean()) if len(values) else math.nan,
    )


def objects_per_image(annotations: Annotations) -> NDArray[np.int64]:
    """Number of boxes (N,) of each image, crowds aside."""
    before = np.concatenate([[0], np.cumsum(~annotations.crowd)])
    counts: NDArray[np.int64] = np.diff(before[annotations.offsets])
    return counts


def _sampled_sizes(annotations: Annotations, image_size: int) -> Sizes:
    count = len(annotations.classes)
    rows = np.linspace(0, count - 1, min(count, SAMPLED_BOXES)).astype(np.int64)
    rows = rows[~annotations.crowd[rows] & (annotations.boxes_xywh[rows, 2:] > 0).all(axis=1)]
    images = np.searchsorted(annotations.offsets, rows, side="right") - 1
    sizes: Sizes = annotations.boxes_xywh[rows, 2:] * (image_size / annotations.sizes[images].max(axis=1))[:, None]
    return sizes
