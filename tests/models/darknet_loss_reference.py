"""Darknet's loss in plain Python and double precision, the reference for models/darknet_loss.py.

It visits one cell and one object at a time. It follows what Darknet computes, gradients first
("delta", what Darknet adds to the raw values), and uses none of the code under test. Overlaps are
differentiated numerically.
"""

import math
from collections import Counter
from itertools import product
from typing import NamedTuple

import numpy as np

from models import Head
from tests.models.loss_reference import Box, overlap, sigmoid

STEP = 1e-6  # of the numerical derivatives, in units of the image
Cell = tuple[int, int, int, int]  # image, anchor, row, column


class Outcome(NamedTuple):
    deltas: list[np.ndarray]  # one for each raw map: minus the gradient of the sum over the images
    losses: tuple[float, float, float]  # box, objectness, classes: sums over the images
    seen: Counter[str]  # how often each rule applied


def darknet(
    raw_maps: list[np.ndarray], targets: list[list[float]], heads: list[Head], image_size: tuple[int, int]
) -> Outcome:
    """The deltas, losses and applied rules of all heads.

    raw_maps: (images, anchors, rows, columns, values) each. targets: (image, class, cx, cy, w, h).
    image_size: (height, width).
    """
    seen: Counter[str] = Counter()
    deltas, losses = [], np.zeros(3)
    for raw, head in zip(raw_maps, heads, strict=True):
        delta, terms = _one_head(raw.astype(float), targets, head, image_size, seen)
        deltas.append(delta)
        losses += terms
    return Outcome(deltas, tuple(losses), seen)


class _Assigned(NamedTuple):
    """What each cell of a head is to learn."""

    objectness: dict[Cell, float | None]  # None: left out
    boxes: list[tuple[Cell, Box]]
    classes: dict[Cell, set[int]]

    def make_positive(self, cell: Cell, label: int, box: Box) -> None:
        self.objectness[cell] = 1.0
        self.boxes.append((cell, box))
        self.classes.setdefault(cell, set()).add(label)


def _one_head(raw: np.ndarray, targets: list, head: Head, image_size: tuple[int, int], seen: Counter) -> tuple:
    keys, activated = head.darknet_loss, _activated(raw, head)
    height, width = image_size
    truths = [(int(i), int(c), (x / width, y / height, w / width, h / height)) for i, c, x, y, w, h in targets]
    wanted = _Assigned({}, [], {})
    _assign_by_overlap(wanted, activated, truths, head, image_size, seen=seen)
    _assign_by_anchor(wanted, raw.shape, truths, head, image_size, seen=seen)

    delta = np.zeros_like(raw)
    box_loss = objectness_loss = class_loss = 0.0
    for cell, target in wanted.objectness.items():
        if target is not None:
            delta[cell][4] = keys.obj_normalizer * (target - activated[cell][4])
            objectness_loss += keys.obj_normalizer * _loss(raw[cell][4], target)
    for cell, labels in wanted.classes.items():
        seen["several classes"] += len(labels) > 1
        for index in range(head.num_classes):
            hot = float(index in labels)
            delta[cell][5 + index] = keys.cls_normalizer * (hot - activated[cell][5 + index])
            class_loss += keys.cls_normalizer * _loss(raw[cell][5 + index], hot)
    for cell, box in wanted.boxes:
        share = keys.iou_normalizer / (len(wanted.classes[cell]) if keys.iou_thresh < 1 else 1)
        part, loss = _box_delta(activated[cell], raw[cell], cell, box, head, shape=raw.shape, image_size=image_size)
        delta[cell][:4] += share * part
        box_loss += share * loss
    return delta, np.array((box_loss, objectness_loss, class_loss))


def _activated(raw: np.ndarray, head: Head) -> np.ndarray:
    """The values as Darknet has them before the loss."""
    probability, activated = np.vectorize(sigmoid)(raw), raw.copy()
    activated[..., : 4 if head.new_coords else 2] = probability[..., : 4 if head.new_coords else 2]
    activated[..., :2] = activated[..., :2] * head.scale_x_y - (head.scale_x_y - 1) / 2
    activated[..., 4:] = probability[..., 4:]
    return activated


def _assign_by_overlap(
    wanted: _Assigned, activated: np.ndarray, truths: list, head: Head, image_size: tuple[int, int], *, seen: Counter
) -> None:
    """Every cell is empty or, if its prediction overlaps an object enough, left out."""
    keys = head.darknet_loss
    for cell in product(*map(range, activated.shape[:4])):
        predicted = _box(activated[cell], cell, head, activated.shape, image_size)
        best = max((overlap(predicted, box, "iou") for image, _, box in truths if image == cell[0]), default=0.0)
        wanted.objectness[cell] = 0.0
        if best > keys.ignore_thresh and max(activated[cell][5:]) > 0.25:
            wanted.objectness[cell] = None
            seen["left out"] += 1
        elif best > keys.ignore_thresh:
            seen["not recognised"] += 1


def _assign_by_anchor(
    wanted: _Assigned, shape: tuple, truths: list, head: Head, image_size: tuple[int, int], *, seen: Counter
) -> None:
    """The cell of an object's centre is positive for the anchors of the object's size."""
    keys, (height, width), (rows, columns) = head.darknet_loss, image_size, shape[2:4]

    for image, label, box in truths:
        column, row = min(int(box[0] * columns), columns - 1), min(int(box[1] * rows), rows - 1)
        alike = [overlap((0, 0, w / width, h / height), (0, 0, *box[2:]), "iou") for w, h in head.all_anchors]
        for anchor, index in enumerate(head.mask):
            if index == alike.index(max(alike)):
                wanted.make_positive((image, anchor, row, column), label, box)
                seen["best"] += 1
            elif keys.iou_thresh < 1 and alike[index] > keys.iou_thresh:
                wanted.make_positive((image, anchor, row, column), label, box)
                seen["alike"] += 1


def _box(values: np.ndarray, cell: Cell, head: Head, shape: tuple, image_size: tuple[int, int]) -> Box:
    """The predicted cx, cy, w, h in units of the image."""
    (_, anchor, row, column), (height, width) = cell, image_size
    grow = (lambda v: 4 * v * v) if head.new_coords else (lambda v: min(math.exp(v), 1e3))
    anchor_w, anchor_h = head.anchors[anchor]
    return (
        (column + values[0]) / shape[3],
        (row + values[1]) / shape[2],
        grow(values[2]) * anchor_w / width,
        grow(values[3]) * anchor_h / height,
    )


def _box_delta(
    values: np.ndarray,
    raw: np.ndarray,
    cell: Cell,
    truth: Box,
    head: Head,
    *,
    shape: tuple,
    image_size: tuple[int, int],
) -> tuple[np.ndarray, float]:
    keys, (height, width) = head.darknet_loss, image_size
    if keys.iou_loss is not None:
        predicted = _box(values, cell, head, shape, image_size)
        delta = _overlap_gradient(predicted, truth, keys.iou_loss.value)
        if not head.new_coords:
            delta[2:] *= np.minimum(np.exp(values[2:4]), 1e3)
        return delta, 1 - overlap(predicted, truth, keys.iou_loss.value)
    scale = 2 - truth[2] * truth[3]
    sizes = np.array((truth[2] * width, truth[3] * height)) / head.anchors[cell[1]]  # in anchors
    offsets = (truth[0] * shape[3] - cell[3], truth[1] * shape[2] - cell[2])
    wanted = np.array((*offsets, *(np.sqrt(sizes / 4) if head.new_coords else np.log(sizes))))
    delta = scale * (wanted - values[:4])
    loss = 0.0
    for index in range(4):
        if index >= 2 and not head.new_coords:
            loss += (wanted[index] - values[index]) ** 2 / 2
        else:  # the integral of the delta over the raw value, from where it is 0
            s = head.scale_x_y if index < 2 else 1.0
            best = (wanted[index] + (s - 1) / 2) / s
            loss += s * (_loss(raw[index], best) - sum(-p * math.log(p) for p in (best, 1 - best) if p > 0))
    return delta, scale * loss


def _overlap_gradient(predicted: Box, truth: Box, kind: str) -> np.ndarray:
    """The gradient of the overlap by the predicted cx, cy, w, h; CIoU's alpha is a constant."""

    def aspect(box: Box) -> float:
        return 4 / math.pi**2 * (math.atan(truth[2] / truth[3]) - math.atan(box[2] / box[3])) ** 2

    def value(box: Box) -> float:
        if kind != "ciou":
            return overlap(box, truth, kind)
        v = aspect(predicted)
        return overlap(box, truth, "diou") - v / (1 - overlap(predicted, truth, "iou") + v) * aspect(box)

    moved = [(np.array(predicted) + sign * STEP * np.eye(4)[i]) for i in range(4) for sign in (1, -1)]
    values = [value(tuple(box)) for box in moved]
    return (np.array(values[::2]) - np.array(values[1::2])) / (2 * STEP)


def _loss(raw: float, wanted: float) -> float:
    p = sigmoid(raw)
    return -wanted * math.log(p) - (1 - wanted) * math.log(1 - p)
