"""Summarise a data set from its index alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data.audit.anchor_fit import Sizes, best_overlaps, network_sizes
from data.index.annotations import Annotations

SAMPLED_BOXES = 200_000  # with nine anchors their overlaps take 0.1 s
LOW_RECALL = 0.98
FIT_RECALL = 0.7  # below it, fitted anchors score better, and worse from there on (docs/results/accuracy.md)

FEW_OBJECTS = 2.5  # at most so many in an image on average
LARGE_SIDE = 0.25  # at least half of them are larger, as a share of the image's longer side


@dataclass(frozen=True)
class SetSummary:
    """The figures that training logs for each set before it starts."""

    images: int
    boxes: int
    classes: int
    empty_images: int  # without boxes, crowds aside
    min_iou: float | None  # None: the loss gives each box its best anchor, whatever the overlap
    # Recall: the share of the boxes that overlap an anchor by more than min_iou. Without min_iou,
    # the mean IoU of a box with its best anchor. NaN without boxes.
    overlap: float

    def line(self) -> str:
        """All figures in one line."""
        empty = f" ({self.empty_images:,} without boxes)" if self.empty_images else ""
        counts = f"{self.images:,} images{empty}, {self.boxes:,} boxes, {self.classes} classes"
        if not self.overlap >= 0:
            return counts
        if self.min_iou is None:
            return f"{counts}, mean IoU with the best anchor {self.overlap:.3f}"
        return f"{counts}, recall of the anchors {self.overlap:.4f} at IoU {self.min_iou:g}"

    def warning(self) -> str | None:
        """A warning if the anchors miss so many boxes that a search for better ones pays."""
        if self.min_iou is None or not self.overlap < LOW_RECALL:
            return None
        return (
            f"warning: {1 - self.overlap:.1%} of the boxes overlap no anchor by more than {self.min_iou:g} and are "
            f"learnt as background only. fix: {fix_of_anchors(self.overlap, self.min_iou)}"
        )


def fix_of_anchors(recall: float, min_iou: float) -> str:
    """The option to change if only a share ``recall`` of the boxes overlaps an anchor enough."""
    looser = f"loss.anchor_iou={min_iou / 2:g}"
    # Heads that are kept go with their own anchors.
    return f"model.anchors=auto; with the heads of pretrained weights, {looser}" if recall < FIT_RECALL else looser


def summarise(annotations: Annotations, image_size: int, anchors: Sizes, min_iou: float | None) -> SetSummary:
    """Count, and measure how anchors (k, 2) fit the boxes at ``image_size`` pixels.

    Images are letterboxed to a square. In large sets, an evenly spread sample of the boxes is
    measured.
    """
    overlaps = best_overlaps(network_sizes(annotations, image_size, SAMPLED_BOXES), anchors)
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
    """The number of boxes (N,) of each image, without crowds."""
    before = np.concatenate([[0], np.cumsum(~annotations.crowd)])
    counts: NDArray[np.int64] = np.diff(before[annotations.offsets])
    return counts


def mean_objects(annotations: Annotations) -> float:
    """The mean number of boxes, crowds aside, of the images that have any; 0 without boxes."""
    counts = objects_per_image(annotations)
    return float(counts[counts > 0].mean()) if counts.any() else 0.0


def median_side(annotations: Annotations) -> float:
    """The median of the boxes' sides (of squares of their area), as a share of the image's longer.

    0 without boxes.
    """
    sizes = network_sizes(annotations, 1, SAMPLED_BOXES)
    return float(np.median(np.sqrt(sizes.prod(axis=1)))) if len(sizes) else 0.0


def few_large_objects(annotations: Annotations) -> str | None:
    """A clause that says so if images hold few large objects of more than one class."""
    count, side = mean_objects(annotations), median_side(annotations)
    if len(annotations.names) == 1 or count > FEW_OBJECTS or not side > LARGE_SIDE:
        return None
    return f"images hold few large objects ({count:.1f} each, half of them above {side:.0%} of the image's longer side)"


def class_weights(annotations: Annotations) -> list[float]:
    """For each class the root of how rare its boxes are, 1 on average over all boxes.

    Crowds do not count. Classes without a box get the weight of the rarest that has one.
    """
    counts = np.bincount(annotations.classes[~annotations.crowd], minlength=len(annotations.names))
    if not counts.any():
        return [1.0] * len(counts)
    weights = 1 / np.sqrt(np.maximum(counts, counts[counts > 0].min()))
    weights *= counts.sum() / (weights * counts).sum()
    return [round(float(weight), 4) for weight in weights]
