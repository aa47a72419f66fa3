"""What is likely wrong with a training set, in sentences that name the option to change."""

from __future__ import annotations

import math

import numpy as np

from data.audit.anchor_fit import Sizes, network_sizes
from data.audit.summary import SAMPLED_BOXES, fix_of_anchors, summarise
from data.index.annotations import Annotations

LEAST_RECALL = 0.9
SMALL_PIXELS, MANY_SMALL = 8, 0.1  # pixels of the longer side; a share of the boxes
FEW_BOXES = 20
NAMED = 3  # classes in a sentence


def data_hints(annotations: Annotations, image_size: int, anchors: Sizes, min_iou: float | None) -> list[str]:
    """A sentence, with its fix, for each likely fault of a training set at ``image_size`` pixels.

    ``anchors`` (k, 2) in pixels. ``min_iou`` is the overlap that a box needs with one; None if each
    box gets its best.
    """
    summary = summarise(annotations, image_size, anchors, min_iou)
    found = [small_boxes(annotations, image_size), few_boxes(annotations)]
    if min_iou is not None and summary.overlap < LEAST_RECALL:
        found.insert(
            0,
            f"{1 - summary.overlap:.0%} of the boxes overlap no anchor by more than {min_iou:g}, so they are not "
            f"learnt. fix: {fix_of_anchors(summary.overlap, min_iou)}",
        )
    return [sentence for sentence in found if sentence is not None]


def small_boxes(annotations: Annotations, image_size: int) -> str | None:
    """A sentence if more than MANY_SMALL of the boxes are tiny at ``image_size`` pixels."""
    sizes = network_sizes(annotations, image_size, SAMPLED_BOXES)
    share = float((sizes.max(axis=1) < SMALL_PIXELS).mean()) if len(sizes) else 0.0
    if share <= MANY_SMALL:
        return None
    larger = math.ceil(image_size * 1.5 / 32) * 32
    return (
        f"{share:.0%} of the boxes are smaller than {SMALL_PIXELS} pixels at train.image_size={image_size}, where few "
        f"are found. fix: train.image_size={larger}, or experiment=small-objects"
    )


def few_boxes(annotations: Annotations) -> str | None:
    """A sentence if some classes have too few boxes, crowds aside, to be learnt."""
    counts = np.bincount(annotations.classes[~annotations.crowd], minlength=len(annotations.names))
    few = np.flatnonzero(counts < FEW_BOXES)
    if not len(few):
        return None
    named = ", ".join(f"{annotations.names[number]} {counts[number]}" for number in few[:NAMED])
    more = ", ..." if len(few) > NAMED else ""
    return (
        f"{len(few)} of {len(counts)} classes have fewer than {FEW_BOXES} boxes ({named}{more}). fix: more images of "
        "them, or train.repeat_threshold=0.1, which shows images of rare classes more often"
    )
