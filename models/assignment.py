"""Assign targets to cells and anchors, with fixed shapes throughout.

Nothing here synchronises with the host (no boolean indexing, no count read back), so an
accelerator queues a whole step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from models.boxes import box_iou_aligned, cxcywh_to_xyxy, wh_iou
from models.config import IouKind
from models.heads import Head

PAIRS_AT_ONCE = 2**18  # boxes x targets compared at once: temporaries of 1 MB fit a CPU's cache


class Cells(NamedTuple):
    """Indices (int64, broadcastable) into the first four dimensions of a raw map."""

    image: Tensor
    anchor: Tensor
    row: Tensor
    column: Tensor

    def flat(self, shape: tuple[int, ...]) -> Tensor:
        """Positions in the flattened (batch, anchors, rows, columns) of a map of that shape."""
        _, anchors, rows, columns = shape[:4]
        return ((self.image * anchors + self.anchor) * rows + self.row) * columns + self.column


class Positives(NamedTuple):
    """Pairs of a target and an anchor of a cell, some of which are positive."""

    weight: Tensor  # (p,) 1 where the pair is positive, else 0
    cells: Cells  # (p,) each
    targets: Tensor  # (p, 6)

    def joined(self, more: "Positives") -> "Positives":
        """These pairs and more."""
        return Positives(
            torch.cat((self.weight, more.weight)),
            Cells(*(torch.cat(pair) for pair in zip(self.cells, more.cells, strict=True))),
            torch.cat((self.targets, more.targets)),
        )


class Anchors(NamedTuple):
    """The anchors of a head as tensors on the device of its raw map."""

    own: Tensor  # (a, 2) widths and heights in pixels
    all: Tensor  # (n, 2) those of the whole .cfg
    mask: Tensor  # (a,) int64: which of all are own


class HeadMap(NamedTuple):
    """A head, its anchors and its raw map."""

    head: Head
    anchors: Anchors
    raw: Tensor


class HeadAnchors(dict[torch.device, list[Anchors]]):
    """The anchors of every head by device. Each device gets them once, because the copy blocks."""

    def __init__(self, heads: Sequence[Head]) -> None:
        self.heads = heads

    def __missing__(self, device: torch.device) -> list[Anchors]:
        self[device] = [
            Anchors(*(torch.tensor(part, device=device) for part in (head.anchors, head.all_anchors, head.mask)))
            for head in self.heads
        ]
        return self[device]


def positives_by_shape(
    targets: Tensor, anchors: Anchors, stride: int, shape: tuple[int, ...], iou_thresh: float
) -> Positives:
    """Pair every target with each anchor of a head in the cell of its centre: t * a pairs.

    The anchor of the .cfg with the most similar shape (the first of equals) is positive if the head
    has it. With iou_thresh below 1 so are the head's anchors whose shape overlaps by more than
    that. A target without a size is in no positive pair: such rows fill up batches.
    """
    overlap = wh_iou(targets[:, 4:6], anchors.all)
    most, anchor = overlap.max(1, keepdim=True)
    positive = (anchor == anchors.mask) & (most > 0)  # (t, a)
    if iou_thresh < 1:
        positive = positive | (overlap[:, anchors.mask] > iou_thresh)
    return Positives(
        weight=positive.float().flatten(),
        cells=Cells(*(index.expand(positive.shape).flatten() for index in centre_cells(targets, stride, shape))),
        targets=targets[:, None].expand(*positive.shape, 6).flatten(0, 1),
    )


def positives_by_overlap(
    targets: Tensor, boxes_xyxy: Tensor, overlaps: Tensor, shape: tuple[int, ...], threshold: float
) -> Positives:
    """Pair every anchor of every cell with the target that its decoded box overlaps most.

    A pair is positive above the threshold. boxes_xyxy, overlaps: argument and result of
    best_overlaps. There must be a target.
    """
    best = first_best_targets(boxes_xyxy, targets, overlaps).clamp(max=len(targets) - 1)
    return Positives(
        weight=(overlaps > threshold).float().flatten(),
        cells=all_cells(shape, boxes_xyxy.device),
        targets=targets[best.flatten()],
    )


def centre_cells(targets: Tensor, stride: int, shape: tuple[int, ...]) -> Cells:
    """The cells with the centres of targets (t, 6), at every anchor: (t, 1) each, anchor (1, a).

    targets: image, class, cx, cy, w, h in pixels. A centre on the image's far edge belongs to the
    last cell.
    """
    _, anchors, rows, columns = shape[:4]
    column, row = (targets[:, 2:4] / stride).floor().long().split(1, dim=1)
    return Cells(
        image=targets[:, :1].long(),
        anchor=torch.arange(anchors, device=targets.device)[None],
        row=row.clamp(0, rows - 1),
        column=column.clamp(0, columns - 1),
    )


def targets_in_cells(targets: Tensor, cells: Cells, stride: int) -> Tensor:
    """Corners (t, p, 4) of targets (t, 6), in pixels from the corners of cells (t, p) or (t, 1)."""
    corners = torch.stack(torch.broadcast_tensors(cells.column, cells.row), dim=-1) * stride
    centres = targets[:, None, 2:4] - corners
    return cxcywh_to_xyxy(torch.cat((centres, targets[:, None, 4:6].expand_as(centres)), dim=-1))


def all_cells(shape: tuple[int, ...], device: torch.device) -> Cells:
    """Every anchor of every cell, in the order of the flattened map."""
    axes = [torch.arange(length, device=device) for length in shape[:4]]
    return Cells(*(axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij")))


@torch.no_grad()
def best_overlaps(boxes_xyxy: Tensor, targets: Tensor) -> Tensor:
    """The largest IoU (batch, n) of each box (batch, n, 4) with a target of its image, or 0.

    targets: (t, 6) image, class, cx, cy, w, h in the pixels of the boxes, in any order. To bound
    memory, only a few targets at a time are compared with the boxes of their images.
    """
    batch, count, _ = boxes_xyxy.shape
    best = boxes_xyxy.new_zeros(batch, count)
    for part in targets.split(max(1, PAIRS_AT_ONCE // count)):
        best.scatter_reduce_(0, *_overlaps(boxes_xyxy, part), reduce="amax")
    return best


@torch.no_grad()
def first_best_targets(boxes_xyxy: Tensor, targets: Tensor, best: Tensor) -> Tensor:
    """The target of each overlap of best_overlaps: int64 (batch, n).

    Ties go to the first target. The value is t where no overlap is above 0.
    """
    count, number = boxes_xyxy.shape[1], len(targets)
    first = torch.full_like(best, number, dtype=torch.int64)
    step = max(1, PAIRS_AT_ONCE // count)
    for start in range(0, number, step):
        image, iou = _overlaps(boxes_xyxy, targets[start : start + step])
        index = torch.arange(start, start + len(iou), device=best.device)[:, None]
        reached = (iou == best.gather(0, image)) & (iou > 0)
        first.scatter_reduce_(0, image, torch.where(reached, index, number), reduce="amin")
    return first


def _overlaps(boxes_xyxy: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Each target's image, and its IoU with all boxes of that image, both (t, n)."""
    image = targets[:, 0].long()
    iou = box_iou_aligned(boxes_xyxy[image], cxcywh_to_xyxy(targets[:, 2:])[:, None], IouKind.iou)
    return image[:, None].expand_as(iou), iou


@torch.no_grad()
def merge_classes(position: Tensor, weight: Tensor, classes: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Give each pair the classes, and the number, of all pairs at its position.

    position: int64 (p,); weight: (p,) 1 where a pair counts, else 0; classes: (p,). Returns the
    classes as (p, num_classes) of 0 and 1, and the number (p,), at least 1. Only pairs that count
    enter.
    """
    order = position.argsort()
    starts = position[order].diff(prepend=position.new_full((1,), -1)) != 0
    group = torch.empty_like(position).scatter_(0, order, starts.cumsum(0) - 1)
    there = weight.new_zeros(len(weight), num_classes)
    there.view(-1).scatter_reduce_(0, group * num_classes + classes.long(), weight, reduce="amax")
    return there[group], weight.new_zeros(len(weight)).scatter_add_(0, group, weight)[group].clamp(min=1)
