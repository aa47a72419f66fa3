"""The YOLOv3-SPP and YOLOX losses in plain Python and double precision, for models/loss.py.

It visits one target and one cell at a time. It follows the formulation in the docstring of that
file and uses none of the code under test.
"""

import math
from itertools import chain, product
from typing import NamedTuple

from models import Head, YoloLossConfig, YoloxLossConfig

Box = tuple[float, float, float, float]
Pair = tuple[list[float], int, int, int, float]  # a target, anchor, row, column, and the weight of the pair


class Candidate(NamedTuple):
    """An anchor of a cell that may learn a target."""

    merit: float
    iou: float
    place: tuple[int, int, int, int, int]  # image, head, anchor, row, column


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def overlap(one: Box, other: Box, kind: str) -> float:
    """IoU and its relatives of two boxes given as cx, cy, w, h."""
    (x1, y1, w1, h1), (x2, y2, w2, h2) = one, other
    left, right = min(x1 - w1 / 2, x2 - w2 / 2), max(x1 + w1 / 2, x2 + w2 / 2)
    top, bottom = min(y1 - h1 / 2, y2 - h2 / 2), max(y1 + h1 / 2, y2 + h2 / 2)
    shared_w = max(0.0, min(x1 + w1 / 2, x2 + w2 / 2) - max(x1 - w1 / 2, x2 - w2 / 2))
    shared_h = max(0.0, min(y1 + h1 / 2, y2 + h2 / 2) - max(y1 - h1 / 2, y2 - h2 / 2))
    union = w1 * h1 + w2 * h2 - shared_w * shared_h
    iou = shared_w * shared_h / union
    if kind == "iou":
        return iou
    if kind == "giou":
        enclosing = (right - left) * (bottom - top)
        return iou - (enclosing - union) / enclosing
    diou = iou - ((x1 - x2) ** 2 + (y1 - y2) ** 2) / ((right - left) ** 2 + (bottom - top) ** 2)
    if kind == "diou":
        return diou
    v = 4 / math.pi**2 * (math.atan(w2 / h2) - math.atan(w1 / h1)) ** 2
    return diou - v * v / (1 - iou + v)


def cross_entropy(logit: float, target: float) -> float:
    p = sigmoid(logit)
    return -target * math.log(p) - (1 - target) * math.log(1 - p)


def sides(values: list[float], head: Head) -> list[list[float]]:
    """The logits of the left, top, right and bottom side."""
    return [values[side * head.box_bins : (side + 1) * head.box_bins] for side in range(4)]


def bin_loss(values: list[float], box: list[float], head: Head, row: int, column: int) -> float:
    """Mean over the sides of the cross-entropy with their distances from the middle of the cell."""
    x, y, w, h = (each / head.stride for each in box)
    x, y, total = x - column - 0.5, y - row - 0.5, 0.0
    distances = [min(max(far, 0.0), head.box_bins - 1.001) for far in (w / 2 - x, h / 2 - y, w / 2 + x, h / 2 + y)]
    for logits, distance in zip(sides(values, head), distances, strict=True):
        all_of = math.log(sum(map(math.exp, logits)))
        total += sum((all_of - logit) * max(0.0, 1 - abs(bin - distance)) for bin, logit in enumerate(logits))
    return total / 4


def decoded(values: list[float], head: Head, a: int, row: int, column: int) -> Box:
    """The box that an anchor of a cell predicts: cx, cy, w, h."""
    if head.box_bins:
        left, top, right, bottom = (
            sum(bin * math.exp(logit) for bin, logit in enumerate(logits)) / sum(map(math.exp, logits))
            for logits in sides(values, head)
        )
        x, y = column + 0.5 + (right - left) / 2, row + 0.5 + (bottom - top) / 2
        return x * head.stride, y * head.stride, (left + right) * head.stride, (top + bottom) * head.stride
    reach, scale = (head.scale_x_y - 1) / 2, head.scale_x_y
    return (
        (column + sigmoid(values[0]) * scale - reach) * head.stride,
        (row + sigmoid(values[1]) * scale - reach) * head.stride,
        min(math.exp(values[2]), 1e3) * head.anchors[a][0],
        min(math.exp(values[3]), 1e3) * head.anchors[a][1],
    )


def by_shape(raw: list, targets: list[list[float]], head: Head, anchor_iou: float) -> list[Pair]:
    """The pairs of targets and anchors of one head with similar shapes."""
    rows, columns = len(raw[0][0]), len(raw[0][0][0])
    found = []
    for target, (a, (anchor_w, anchor_h)) in product(targets, enumerate(head.anchors)):
        _, _, x, y, w, h = target
        shared = min(w, anchor_w) * min(h, anchor_h)
        if shared / (w * h + anchor_w * anchor_h - shared) > anchor_iou:
            found.append(
                (target, a, min(int(y // head.stride), rows - 1), min(int(x // head.stride), columns - 1), 1.0)
            )
    return found


def by_prediction(
    maps: list, targets: list[list[float]], heads: list[Head], count: int, by: str
) -> list[tuple[int, Pair]]:
    """For each head's number the pairs whose predictions suit their targets best."""
    chosen: list[list[Candidate]] = []
    for target in targets:
        image, label, x, y, w, h = target
        candidates = []
        for number, (raw, head) in enumerate(zip(maps, heads, strict=True)):
            rows, columns, reach = len(raw[0][0]), len(raw[0][0][0]), (head.scale_x_y - 1) / 2
            own = (min(int(y // head.stride), rows - 1), min(int(x // head.stride), columns - 1))
            for a, row, column in product(range(len(head.anchors)), range(rows), range(columns)):
                offsets = (y / head.stride - row, x / head.stride - column)
                if (row, column) == own or all(-reach < offset < 1 + reach for offset in offsets):
                    values = raw[int(image)][a][row][column]
                    iou = overlap(decoded(values, head, a, row, column), (x, y, w, h), "iou")
                    if iou > 0:
                        place = (int(image), number, a, row, column)
                        candidates.append(Candidate(merit(iou, values, head.num_classes, int(label), by), iou, place))
        most = sorted((candidate.iou for candidate in candidates), reverse=True)[:count]
        learn = max(min(3, count), int(sum(most))) if by == "cost" else count
        chosen.append(sorted(candidates, key=lambda candidate: -candidate.merit)[:learn])
    rank = (lambda candidate: candidate.merit) if by == "cost" else (lambda candidate: candidate.iou)
    largest: dict[tuple, float] = {}
    for candidate in chain(*chosen):
        largest[candidate.place] = max(largest.get(candidate.place, -math.inf), rank(candidate))
    found = []
    for target, candidates in zip(targets, chosen, strict=True):
        kept = [candidate for candidate in candidates if rank(candidate) == largest[candidate.place]]
        for candidate in kept:
            weight = candidate.merit / kept[0].merit if by == "alignment" else 1.0
            _, number, a, row, column = candidate.place
            found.append((number, (target, a, row, column, round(weight * 256) / 256)))
    return found


def merit(iou: float, values: list[float], classes: int, label: int, by: str) -> float:
    """How well a prediction suits a target of the class ``label``: more is better."""
    scores = [sigmoid(values[-classes - 1]) * sigmoid(logit) for logit in values[-classes:]]
    if by == "alignment":
        return scores[label] * iou**6
    losses = (-math.log(p**0.5 if index == label else 1 - p**0.5) for index, p in enumerate(scores))
    return -(sum(losses) - 3 * math.log(iou))


def distance(predicted: Box, box: list[float], stride: int) -> float:
    """L1: centres in cells, sizes as logarithms."""
    centres = sum(abs(one - other) / stride for one, other in zip(predicted[:2], box[:2], strict=True))
    return centres + sum(abs(math.log(one / other)) for one, other in zip(predicted[2:], box[2:], strict=True))


def yolo_loss(
    raw_maps: list[list],
    targets: list[list[float]],
    heads: list[Head],
    config: YoloLossConfig | YoloxLossConfig,
    ratio: float = 1.0,
    *,
    fixed_maps: list[list] | None = None,
    refines: bool = False,
) -> list[float]:
    """Weighted terms of maps[image][anchor][row][column][value], in the order of LossParts.

    fixed_maps: the predictions that choose positives and set the targets of objectness and classes,
    by default the same. The gradient treats them as constants. refines: whether YOLOX's loss has
    the distance of the boxes.
    """
    fixed_maps = fixed_maps or raw_maps
    of_yolox = isinstance(config, YoloxLossConfig)
    if of_yolox:
        learnt = by_prediction(fixed_maps, targets, heads, config.positives, config.positives_by.value)
    heads_terms = []  # of each head: sums over its positives and cells, and how many these are
    for number, (raw, fixed, head) in enumerate(zip(raw_maps, fixed_maps, heads, strict=True)):
        rows, columns = len(raw[0][0]), len(raw[0][0][0])
        wanted: dict[tuple[int, int, int, int], float] = {}
        box_loss = class_loss = dfl = l1 = positives = 0.0
        if of_yolox:
            pairs = [pair for of_head, pair in learnt if of_head == number]
        else:
            pairs = by_shape(raw, targets, head, config.anchor_iou)
        for (image, label, *box), a, row, column, weight in pairs:
            values = raw[int(image)][a][row][column]
            predicted = decoded(values, head, a, row, column)
            iou = overlap(predicted, tuple(box), config.iou.value)
            box_loss += weight * (1 - (iou**2 if of_yolox and config.iou.value == "iou" else iou))
            if refines and of_yolox:
                l1 += weight * distance(predicted, box, head.stride)
            if head.box_bins:
                dfl += weight * bin_loss(values, box, head, row, column)
            positives += weight
            cell = (int(image), a, row, column)
            quality = overlap(
                decoded(fixed[cell[0]][a][row][column], head, a, row, column),
                tuple(box),
                "iou" if of_yolox else config.iou.value,
            )
            there = 1 if of_yolox else 1 - ratio + ratio * max(quality, 0.0)
            wanted[cell] = max(wanted.get(cell, 0.0), there * weight)
            for index, logit in enumerate(values[-head.num_classes :]):
                loss = cross_entropy(logit, float(index == label) * (max(quality, 0.0) if of_yolox else 1))
                class_loss += loss * weight / (1 if of_yolox else head.num_classes)
        cells = list(product(range(len(raw)), range(len(head.anchors)), range(rows), range(columns)))
        objectness = sum(
            cross_entropy(raw[i][a][r][c][-head.num_classes - 1], wanted.get((i, a, r, c), 0.0)) for i, a, r, c in cells
        )
        heads_terms.append(((box_loss, objectness, class_loss, dfl, l1), positives, len(cells)))
    if of_yolox:
        gains = config.box, config.objectness, config.classification, config.box * config.dfl, config.box * config.l1
        divisor = max(sum(positives for _, positives, _ in heads_terms), len(raw_maps[0]))
        divisors = [[divisor] * 5] * len(heads)
    else:
        gains = config.box, config.objectness, config.classification * heads[0].num_classes / 80, 0, 0
        divisors = [[max(positives, 1), cells, max(positives, 1), 1, 1] for _, positives, cells in heads_terms]
    return [
        gain * sum(terms[i] / by[i] for (terms, _, _), by in zip(heads_terms, divisors, strict=True))
        for i, gain in enumerate(gains)
    ]
