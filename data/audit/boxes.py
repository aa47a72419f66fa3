"""Figures on the boxes of a set: counts, classes, sizes against strides and anchors, repeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.audit.anchor_fit import Sizes, best_overlaps, network_sizes
from data.audit.summary import objects_per_image
from data.index.annotations import Annotations

QUANTILES = {"least": 0.0, "p05": 0.05, "median": 0.5, "p95": 0.95, "most": 1.0}


def boxes_given_twice(annotations: Annotations) -> NDArray[np.int64]:
    """The rows (n,) that repeat an earlier one: same image, class, box and crowd flag."""
    images = np.repeat(np.arange(len(annotations)), np.diff(annotations.offsets))
    keys = (images, annotations.classes, annotations.crowd, *annotations.boxes_xywh.T)
    order = np.lexsort(keys)  # stable: of equal rows the earlier first
    same = np.ones(max(0, len(order) - 1), dtype=bool)
    for key in keys:
        same &= key[order[1:]] == key[order[:-1]]
    return np.sort(order[1:][same])


def box_name(annotations: Annotations, row: int) -> str:
    """The name of a box in messages: its image, class and numbers."""
    image = int(np.searchsorted(annotations.offsets, row, side="right")) - 1
    numbers = ", ".join(f"{number:g}" for number in annotations.boxes_xywh[row])
    return f"{annotations.path(image)}: {annotations.names[annotations.classes[row]]} [{numbers}] (x, y, w, h)"


def statistics(
    annotations: Annotations, image_size: int, strides: Sequence[int], anchors: Sizes, min_iou: float
) -> dict[str, Any]:
    """Figures of one set, for a network with these strides and anchors (k, 2), with fixed keys.

    Box sizes are those in images letterboxed to ``image_size`` pixels, without crowds. Figures are
    ``None`` where there is nothing to count.
    """
    names = annotations.names
    sizes = network_sizes(annotations, image_size)
    objects = ~annotations.crowd & (annotations.boxes_xywh[:, 2:] > 0).all(axis=1)  # as network_sizes
    classes = np.asarray(annotations.classes)[objects]
    images = np.repeat(np.arange(len(annotations)), np.diff(annotations.offsets))[objects]
    in_images = np.unique(images * len(names) + classes) % len(names)
    overlaps = best_overlaps(sizes, anchors)
    found = (overlaps > min_iou).astype(np.float64)
    class_boxes = np.bincount(classes, minlength=len(names))
    class_recall = np.bincount(classes, found, minlength=len(names)) / np.maximum(class_boxes, 1)
    counts = objects_per_image(annotations)
    heights, widths = annotations.sizes.T
    return {
        "images": len(annotations),
        "boxes": len(classes),
        "crowds": int(np.count_nonzero(annotations.crowd)),
        "empty_images": int((counts == 0).sum()),
        "boxes_per_image": _spread(counts) | {"mean": _mean(counts)},
        "image_width": _spread(widths),
        "image_height": _spread(heights),
        "image_aspect": _spread(widths / heights),
        "classes": [
            {"name": name, "boxes": int(boxes), "images": int(shown), "recall": float(rate) if boxes else None}
            for name, boxes, shown, rate in zip(
                names, class_boxes, np.bincount(in_images, minlength=len(names)), class_recall, strict=True
            )
        ],
        "box_width": _spread(sizes[:, 0]),
        "box_height": _spread(sizes[:, 1]),
        "box_aspect": _spread(sizes[:, 0] / sizes[:, 1]),
        "longer_side_below_stride": {str(stride): _mean(sizes.max(axis=1) < stride) for stride in sorted(strides)},
        "recall": _mean(found),
        "mean_best_iou": _mean(overlaps),
    }


def _spread(values: NDArray[Any]) -> dict[str, float | None]:
    if not len(values):
        return dict.fromkeys(QUANTILES)
    return dict(zip(QUANTILES, np.quantile(values, list(QUANTILES.values())).tolist(), strict=True))


def _mean(values: NDArray[Any]) -> float | None:
    return float(values.mean()) if len(values) else None
