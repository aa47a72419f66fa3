"""Figures of a data set from its index alone, and anchors that fit its boxes.

Sizes are (width, height) in pixels of images letterboxed to the training size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data.index import Annotations

Sizes = NDArray[np.float64]  # (n, 2) width, height

CHUNK = 65536  # boxes compared at once, which bounds memory
KMEANS_ROUNDS = 300
MUTATED_SHARE = 0.9  # of the values of a candidate, at random
MUTATION = 0.1  # standard deviation of the factor's logarithm
SAMPLED_BOXES = 200_000  # with nine anchors their overlaps take 0.1 s
LOW_RECALL = 0.98
FIT_RECALL = 0.7  # below it, fitted anchors score better, and worse from there on (docs/results/notebook.md)

FEW_OBJECTS = 2.5  # at most so many in an image on average
LARGE_SIDE = 0.25  # at least half of them are larger, as a share of the image's longer side
MOST_BOXES = 10_000  # to fit to; with nine anchors that takes seconds
SEED = 0
ROUNDS = 300  # of refinement
GAIN = 0.03  # of the mean best IoU; for less, the anchors of the .cfg stay
NEAR = 0.2  # overlap that serves a loss without a limit of its own; that of loss=yolov3
LEAST_SIDE = 1.0  # pixels


def network_sizes(annotations: Annotations, image_size: int, most: int | None = None) -> Sizes:
    """Return sizes of all boxes but crowds, in images letterboxed to ``image_size`` pixels.

    Of more than ``most`` boxes, that many are looked at, spread evenly over the set.
    """
    count = len(annotations.classes)
    rows = np.linspace(0, count - 1, min(count, most or count)).astype(np.int64)
    rows = rows[~annotations.crowd[rows] & (annotations.boxes_xywh[rows, 2:] > 0).all(axis=1)]
    images = np.searchsorted(annotations.offsets, rows, side="right") - 1
    sizes: Sizes = annotations.boxes_xywh[rows, 2:] * (image_size / annotations.sizes[images].max(axis=1))[:, None]
    return sizes


def best_overlaps(sizes: Sizes, anchors: Sizes) -> NDArray[np.float64]:
    """For each size (n, 2) the largest IoU (n,) with a concentric anchor (k, 2)."""
    return _overlaps(sizes, anchors, lambda ious: ious.max(axis=1))


def nearest_anchors(sizes: Sizes, anchors: Sizes) -> NDArray[np.int64]:
    """For each size (n, 2) the index (n,) of the anchor with the largest IoU; first of equals."""
    return _overlaps(sizes, anchors, lambda ious: ious.argmax(axis=1)).astype(np.int64)


def recall(sizes: Sizes, anchors: Sizes, min_iou: float) -> float:
    """Share of the sizes that overlap an anchor by more than ``min_iou``; NaN without sizes."""
    return float((best_overlaps(sizes, anchors) > min_iou).mean()) if len(sizes) else float("nan")


def kmeans_anchors(sizes: Sizes, count: int, generator: np.random.Generator) -> Sizes:
    """``count`` anchors by k-means, smallest area first.

    The distance is 1 - IoU (Redmon and Farhadi 2017, section 2). The start is spread over the range
    of areas, so that rare large boxes count. A centre that loses all its sizes moves to the size
    that fits worst. Raises ``ValueError`` for fewer distinct sizes than anchors.
    """
    if len(np.unique(sizes, axis=0)) < count:
        raise ValueError(f"there are fewer different box sizes than the {count} anchors asked for")
    by_area = sizes[np.argsort(sizes.prod(axis=1))]
    anchors = by_area[np.linspace(0, len(by_area) - 1, 2 * count + 1).round().astype(int)[1::2]]
    anchors = anchors * generator.uniform(0.99, 1.01, anchors.shape)  # no two alike
    nearest = np.full(len(sizes), -1)
    for _ in range(KMEANS_ROUNDS):
        previous, nearest = nearest, nearest_anchors(sizes, anchors)
        if (nearest == previous).all():
            break
        for number in range(count):
            own = sizes[nearest == number]
            anchors[number] = own.mean(axis=0) if len(own) else sizes[best_overlaps(sizes, anchors).argmin()]
    return sorted_by_area(anchors)


def refine_anchors(
    sizes: Sizes,
    anchors: Sizes,
    rounds: int,
    generator: np.random.Generator,
    report: Callable[[int, float], None] | None = None,
) -> Sizes:
    """Improve the mean best overlap of ``anchors`` with the sizes; smallest area first.

    A genetic search with one parent: each of ``rounds`` multiplies some values by random factors
    around 1 and keeps the better set. ``report`` receives the finished rounds and the best mean
    overlap so far.
    """
    best = anchors
    fitness = float(best_overlaps(sizes, best).mean())
    for done in range(1, rounds + 1):
        factors = np.exp(generator.normal(0, MUTATION, best.shape))
        factors[generator.random(best.shape) > MUTATED_SHARE * generator.random()] = 1
        candidate = np.maximum(best * factors, 1.0)
        value = float(best_overlaps(sizes, candidate).mean())
        if value > fitness:
            best, fitness = candidate, value
        if report is not None:
            report(done, fitness)
    return sorted_by_area(best)


def sorted_by_area(anchors: Sizes) -> Sizes:
    """The anchors in ascending order of area, as .cfg files list them."""
    ordered: Sizes = anchors[np.argsort(anchors.prod(axis=1), kind="stable")]
    return ordered


def _overlaps(
    sizes: Sizes, anchors: Sizes, reduce: Callable[[NDArray[np.float64]], NDArray[np.generic]]
) -> NDArray[np.float64]:
    areas = anchors.prod(axis=1)
    parts = []
    for start in range(0, len(sizes), CHUNK):
        part = sizes[start : start + CHUNK]
        shared = np.minimum(part[:, None], anchors[None]).prod(axis=2)
        parts.append(reduce(shared / (part.prod(axis=1)[:, None] + areas - shared)))
    return np.concatenate(parts) if parts else np.zeros(0)


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


def choose_anchors(
    annotations: Annotations,
    image_size: int,
    current: Sizes,
    slots: Sequence[int],
    min_iou: float | None,
) -> tuple[Sizes | None, str]:
    """Anchors (k, 2) in place of ``current``, or None if these serve; and a sentence for the log.

    ``min_iou`` is the overlap with an anchor that a box needs to be learnt; None, where each box
    gets its best anchor, stands for NEAR. Where ``current`` gives FIT_RECALL of the boxes that, a
    closer fit is no gain: it cost up to half of the AP and more (docs/results/notebook.md).

    ``slots`` are the rows of ``current`` that the heads use, in the order in which they shall hold
    larger and larger anchors. The other rows stay. Sizes are those in images letterboxed to
    ``image_size`` pixels. The same data give the same anchors.
    """
    sizes, slots = network_sizes(annotations, image_size, MOST_BOXES), list(slots)
    if not len(sizes):
        return None, "there are no boxes to fit to, so the anchors of the .cfg stay"
    least = NEAR if min_iou is None else min_iou
    if (reached := recall(sizes, current[slots], least)) >= FIT_RECALL:
        return None, (
            f"the anchors of the .cfg stay: {reached:.1%} of the boxes overlap one by more than {least:g}, and a "
            "closer fit can cost AP"
        )
    chosen = current.copy()
    chosen[slots] = np.maximum(_fit(sizes, len(slots)), LEAST_SIDE).round(1)
    before, after = (float(best_overlaps(sizes, anchors[slots]).mean()) for anchors in (current, chosen))
    measured = f"recall at IoU 0.5 is {recall(sizes, current[slots], 0.5):.3f}"
    fit = f"{recall(sizes, chosen[slots], 0.5):.3f} with anchors fitted to the boxes at {image_size} pixels"
    overlap = f"mean best IoU {before:.3f}, then {after:.3f}"
    if after <= before + GAIN:
        return None, f"the anchors of the .cfg stay: {measured}, {fit} ({overlap}, not {GAIN:g} more)"
    listed = "  ".join(f"{width:g},{height:g}" for width, height in chosen)
    return chosen, f"{measured} with the anchors of the .cfg, {fit}, which replace them ({overlap}): {listed}"


def _fit(sizes: Sizes, count: int) -> Sizes:
    """``count`` anchors, smallest area first; of fewer sizes each one, then neighbours of them."""
    distinct = np.unique(sizes, axis=0)
    if len(distinct) >= count:
        generator = np.random.default_rng(SEED)
        return refine_anchors(sizes, kmeans_anchors(sizes, count, generator), ROUNDS, generator)
    steps = np.arange(count)
    factors = 1.25 ** np.where(steps % 2, -(steps + 1) // 2, steps // 2)  # 1, then ever smaller and larger ones
    return sorted_by_area((factors[:, None, None] * distinct).reshape(-1, 2)[:count])
