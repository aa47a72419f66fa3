"""Anchors for ``model.anchors=auto``: fitted to a data set, or those that are there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from data.audit.anchor_fit import (
    Sizes,
    best_overlaps,
    kmeans_anchors,
    network_sizes,
    recall,
    refine_anchors,
    sorted_by_area,
)
from data.audit.summary import FIT_RECALL
from data.index.annotations import Annotations
from data.index.cache import keep_result

MOST_BOXES = 10_000  # to fit to; with nine anchors that takes seconds
SEED = 0
ROUNDS = 300  # of refinement
GAIN = 0.03  # of the mean best IoU; for less, the anchors of the .cfg stay
NEAR = 0.2  # overlap that serves a loss without a limit of its own; that of loss=yolov3
LEAST_SIDE = 1.0  # pixels


def choose_anchors(
    annotations: Annotations,
    image_size: int,
    current: Sizes,
    slots: Sequence[int],
    min_iou: float | None,
    index_dir: Path,
) -> tuple[Sizes | None, str]:
    """Anchors (k, 2) in place of ``current``, or None if these serve; and a sentence for the log.

    ``min_iou`` is the overlap with an anchor that a box needs to be learnt; None, where each box
    gets its best anchor, stands for NEAR. Where ``current`` gives FIT_RECALL of the boxes that, a
    closer fit is no gain: it cost up to half of the AP and more (docs/results/accuracy.md).

    ``slots`` are the rows of ``current`` that the heads use, in the order in which they shall hold
    larger and larger anchors. The other rows stay. Sizes are those in images letterboxed to
    ``image_size`` pixels. The same data give the same anchors, and a fit is kept in ``index_dir``.
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
    chosen[slots] = np.maximum(_kept_fit(sizes, len(slots), index_dir), LEAST_SIDE).round(1)
    before, after = (float(best_overlaps(sizes, anchors[slots]).mean()) for anchors in (current, chosen))
    found = f"recall at IoU 0.5 is {recall(sizes, current[slots], 0.5):.3f}"
    fit = f"{recall(sizes, chosen[slots], 0.5):.3f} with anchors fitted to the boxes at {image_size} pixels"
    overlap = f"mean best IoU {before:.3f}, then {after:.3f}"
    if after <= before + GAIN:
        return None, f"the anchors of the .cfg stay: {found}, {fit} ({overlap}, not {GAIN:g} more)"
    listed = "  ".join(f"{width:g},{height:g}" for width, height in chosen)
    return chosen, f"{found} with the anchors of the .cfg, {fit}, which replace them ({overlap}): {listed}"


def _kept_fit(sizes: Sizes, count: int, index_dir: Path) -> Sizes:
    """``_fit``, or what it gave for the same sizes before, whatever data set they came from."""
    key = hashlib.sha256(json.dumps([count, ROUNDS, SEED]).encode() + np.ascontiguousarray(sizes).tobytes())
    path = index_dir / f".{key.hexdigest()[:32]}.anchors"
    with suppress(OSError, ValueError):  # none is kept, or half of one
        kept = np.array(json.loads(path.read_text(encoding="utf-8")), dtype=np.float64)
        if kept.shape == (count, 2):
            return kept
    anchors = _fit(sizes, count)
    keep_result(path, anchors.tolist())
    return anchors


def _fit(sizes: Sizes, count: int) -> Sizes:
    """``count`` anchors, smallest area first; of fewer sizes each one, then neighbours of them."""
    distinct = np.unique(sizes, axis=0)
    if len(distinct) >= count:
        generator = np.random.default_rng(SEED)
        return refine_anchors(sizes, kmeans_anchors(sizes, count, generator), ROUNDS, generator)
    steps = np.arange(count)
    factors = 1.25 ** np.where(steps % 2, -(steps + 1) // 2, steps // 2)  # 1, then ever smaller and larger ones
    return sorted_by_area((factors[:, None, None] * distinct).reshape(-1, 2)[:count])
