"""How well anchors fit the boxes of a data set, and a search for better ones.

Sizes are (width, height) in pixels of images letterboxed to the training size.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from data.index.annotations import Annotations

Sizes = NDArray[np.float64]  # (n, 2) width, height

CHUNK = 65536  # boxes compared at once, which bounds memory
KMEANS_ROUNDS = 300
MUTATED_SHARE = 0.9  # of the values of a candidate, at random
MUTATION = 0.1  # standard deviation of the factor's logarithm


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
            mine = sizes[nearest == number]
            anchors[number] = mine.mean(axis=0) if len(mine) else sizes[best_overlaps(sizes, anchors).argmin()]
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
