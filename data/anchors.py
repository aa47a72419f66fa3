"""Statistics of a data set from its index alone, and anchors that fit its boxes.

Sizes are (width, height) in pixels of images letterboxed to the training size.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from data.geometry import MIN_SIDE, ImageSize, both_sides
from data.index import Annotations
from data.io import Float64, Int64
from data.progress import counted, tracked

Sizes = Float64  # (n, 2) width, height

BOXES_AT_ONCE = 65536  # compared with the anchors, which bounds memory
KMEANS_ROUNDS = 300
MUTATED_SHARE = 0.9  # of the values of a candidate, at random
MUTATION = 0.1  # standard deviation of the factor's logarithm
SAMPLED_BOXES = 200_000  # with nine anchors their overlaps take 0.1 s
LOW_RECALL = 0.98
FIT_RECALL = 0.7  # below it fitted anchors score better, above it worse (docs/results/notebook.md)
FITTED_BOXES = 10_000  # with nine anchors, fitting to these takes seconds
SEED = 0
REFINEMENT_ROUNDS = 300
MIN_GAIN = 0.03  # in the mean best IoU; for less, the anchors of the .cfg stay
DEFAULT_MIN_IOU = 0.2  # for a loss without such a limit; that of loss=yolov3


def network_sizes(annotations: Annotations, image_size: ImageSize, max_boxes: int | None = None) -> Sizes:
    """Return the sizes of all boxes but crowds, in images letterboxed to ``image_size``.

    Of more than ``max_boxes``, a sample spread evenly over the set is used.
    """
    count = len(annotations.classes)
    rows = np.linspace(0, count - 1, min(count, max_boxes or count)).astype(np.int64)
    rows = rows[~annotations.crowd[rows] & (annotations.boxes_xywh[rows, 2:] > 0).all(axis=1)]
    images = np.searchsorted(annotations.offsets, rows, side="right") - 1
    scale = (np.array(both_sides(image_size)) / annotations.sizes[images]).min(axis=1)
    return np.asarray(annotations.boxes_xywh[rows, 2:] * scale[:, None])


def too_small(sizes: Sizes) -> NDArray[np.bool_]:
    """Which (n,) sizes (n, 2) a training leaves out unless augmentation enlarges them."""
    return np.asarray(sizes.min(axis=1) <= MIN_SIDE)


def match_anchors(sizes: Sizes, anchors: Sizes) -> tuple[Float64, Int64]:
    """Best IoU (n,) of sizes (n, 2) with concentric anchors (k, 2), and the first index with it."""
    areas = anchors.prod(axis=1)
    overlaps, nearest = [np.zeros(0)], [np.zeros(0, np.int64)]
    for start in range(0, len(sizes), BOXES_AT_ONCE):
        chunk = sizes[start : start + BOXES_AT_ONCE, None]
        shared = np.minimum(chunk, anchors).prod(axis=2)
        ious = shared / (chunk.prod(axis=2) + areas - shared)
        overlaps.append(ious.max(axis=1))
        nearest.append(ious.argmax(axis=1))
    return np.concatenate(overlaps), np.concatenate(nearest)


def recall(sizes: Sizes, anchors: Sizes, min_iou: float) -> float:
    """Share of the sizes that overlap an anchor by more than ``min_iou``; NaN without sizes."""
    return float((match_anchors(sizes, anchors)[0] > min_iou).mean()) if len(sizes) else float("nan")


def kmeans_anchors(sizes: Sizes, count: int, generator: np.random.Generator) -> Sizes:
    """``count`` anchors by k-means, smallest area first.

    The distance is 1 - IoU (Redmon and Farhadi 2017, section 2). The first centres are spread over
    the range of areas, so that rare large boxes count. A centre that loses all its sizes moves to
    the size that fits worst. Raises ``ValueError`` for fewer distinct sizes than anchors.
    """
    if len(np.unique(sizes, axis=0)) < count:
        raise ValueError(f"there are fewer distinct box sizes than the {count} anchors asked for")
    by_area = sizes[np.argsort(sizes.prod(axis=1))]
    anchors = by_area[np.linspace(0, len(by_area) - 1, 2 * count + 1).round().astype(int)[1::2]]
    anchors = anchors * generator.uniform(0.99, 1.01, anchors.shape)  # no two alike
    nearest = np.full(len(sizes), -1)
    for _ in range(KMEANS_ROUNDS):
        previous, (_, nearest) = nearest, match_anchors(sizes, anchors)
        if (nearest == previous).all():
            break
        for number in range(count):
            members = sizes[nearest == number]
            if len(members):
                anchors[number] = members.mean(axis=0)
            else:
                anchors[number] = sizes[match_anchors(sizes, anchors)[0].argmin()]
    return sorted_by_area(anchors)


def refine_anchors(sizes: Sizes, anchors: Sizes, rounds: int, generator: np.random.Generator) -> Sizes:
    """Improve the mean best overlap of ``anchors`` with the sizes; smallest area first.

    A genetic search: each round multiplies some values by random factors and keeps the better set.
    """
    best = anchors
    fitness = float(match_anchors(sizes, best)[0].mean())
    for _ in tracked(range(rounds), rounds, "refining anchors", "round"):
        factors = np.exp(generator.normal(0, MUTATION, best.shape))
        factors[generator.random(best.shape) > MUTATED_SHARE * generator.random()] = 1
        candidate = np.maximum(best * factors, 1.0)
        value = float(match_anchors(sizes, candidate)[0].mean())
        if value > fitness:
            best, fitness = candidate, value
    return sorted_by_area(best)


def sorted_by_area(anchors: Sizes) -> Sizes:
    """The anchors in ascending order of area, as .cfg files list them."""
    return anchors[np.argsort(anchors.prod(axis=1), kind="stable")]


def fix_of_anchors(recall: float, min_iou: float) -> str:
    """The option to change if only a share ``recall`` of the boxes overlaps an anchor enough."""
    looser = f"loss.anchor_iou={min_iou / 2:g}"
    # Pretrained heads need the anchors they were trained with.
    if recall < FIT_RECALL:
        return f"model.anchors=auto; with the heads of pretrained weights, {looser}"
    return looser


def describe_set(
    annotations: Annotations, image_size: ImageSize, anchors: Sizes, min_iou: float | None
) -> tuple[str, str | None]:
    """Describe a set, below it how the anchors (k, 2) fit; warn if they do not at ``image_size``.

    The recall is the share of the boxes, or of a sample, that overlap an anchor by more than
    ``min_iou``; None: the loss gives each box its best anchor, so the line has the mean IoU.
    """
    empty = np.count_nonzero(objects_per_image(annotations) == 0)
    images = counted(len(annotations), "image") + (f" ({empty:,} without boxes)" if empty else "")
    tiny = np.count_nonzero(too_small(network_sizes(annotations, image_size)))
    boxes = counted(len(annotations.classes), "box") + (f" ({tiny:,} too small to learn)" if tiny else "")
    line = f"{images}, {boxes}, {counted(len(annotations.names), 'class')}"
    overlaps, _ = match_anchors(network_sizes(annotations, image_size, SAMPLED_BOXES), anchors)
    if not len(overlaps):
        return line, None
    if min_iou is None:
        return f"{line}\n  mean IoU with the best anchor {overlaps.mean():.3f}", None
    reached = float((overlaps > min_iou).mean())
    line = f"{line}\n  recall of the anchors {reached:.4f} at IoU {min_iou:g}"
    if reached >= LOW_RECALL:
        return line, None
    missed = f"{1 - reached:.1%} of the boxes overlap no anchor by more than {min_iou:g}"
    return line, f"warning: {missed} and are learnt only as background. fix: {fix_of_anchors(reached, min_iou)}"


def objects_per_image(annotations: Annotations) -> Int64:
    """The number of boxes (N,) of each image, without crowds."""
    before = np.concatenate([[0], np.cumsum(~annotations.crowd)])
    return np.diff(before[annotations.offsets])


def choose_anchors(
    annotations: Annotations, image_size: ImageSize, current: Sizes, slots: Sequence[int], min_iou: float | None
) -> tuple[Sizes | None, str]:
    """Return anchors (k, 2) to replace ``current``, or None to keep it; and a sentence for the log.

    A box is learnt if it overlaps an anchor by ``min_iou``; None, where each box gets its best
    anchor, stands for DEFAULT_MIN_IOU. Anchors that serve FIT_RECALL of the boxes stay: a closer
    fit cost up to half of the AP and more (docs/results/notebook.md). ``slots`` are the rows of
    ``current`` that the heads use, in ascending order of the anchors to put there; the other rows
    stay. The same data give the same anchors.
    """
    sizes, slots = network_sizes(annotations, image_size, FITTED_BOXES), list(slots)
    if not len(sizes):
        return None, "there are no boxes to fit to, so the anchors of the .cfg stay"
    min_iou = DEFAULT_MIN_IOU if min_iou is None else min_iou
    before, _ = match_anchors(sizes, current[slots])
    reached = (before > min_iou).mean()
    if reached >= FIT_RECALL:
        fitting = f"{reached:.1%} of the boxes overlap one by more than {min_iou:g}"
        return None, f"the anchors of the .cfg stay: {fitting}, and a closer fit can cost AP"
    chosen = current.copy()
    chosen[slots] = np.maximum(_fit(sizes, len(slots)), 1.0).round(1)  # pixels, as in refine_anchors
    after, _ = match_anchors(sizes, chosen[slots])
    measured = f"recall at IoU 0.5 is {(before > 0.5).mean():.3f}"
    fit = f"{(after > 0.5).mean():.3f} with anchors fitted to the boxes at {image_size} pixels"
    overlap = f"mean best IoU {before.mean():.3f}, then {after.mean():.3f}"
    if after.mean() <= before.mean() + MIN_GAIN:
        return None, f"the anchors of the .cfg stay: {measured}, {fit} ({overlap}, not {MIN_GAIN:g} more)"
    listed = "  ".join(f"{width:g},{height:g}" for width, height in chosen)
    return chosen, f"{measured} with the anchors of the .cfg, {fit}, which replace them ({overlap}): {listed}"


def _fit(sizes: Sizes, count: int) -> Sizes:
    """``count`` anchors, smallest area first; for fewer sizes, all of them scaled up and down."""
    distinct = np.unique(sizes, axis=0)
    if len(distinct) >= count:
        generator = np.random.default_rng(SEED)
        return refine_anchors(sizes, kmeans_anchors(sizes, count, generator), REFINEMENT_ROUNDS, generator)
    steps = np.arange(count)
    factors = 1.25 ** np.where(steps % 2, -(steps + 1) // 2, steps // 2)  # 1, then smaller and larger in turn
    return sorted_by_area((factors[:, None, None] * distinct).reshape(-1, 2)[:count])
