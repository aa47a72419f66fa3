"""Assign targets to cells and anchors: by shape, as Darknet does, or by the predictions.

Nothing here synchronises with the host (no boolean indexing, no count read back), so an
accelerator queues a whole step.

Predictions choose several positives for each object, as in task-aligned one-stage detection (Feng
et al. 2021, section 3.2) or SimOTA (YOLOX, Ge et al. 2021, section 2.1). The candidates are the
anchors of all cells from which the decoding reaches the centre of the object: its own cell and, if
scale_x_y is above 1, neighbours.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.config import IouKind, PositivesBy
from models.decode import at_least_float32, box_iou_aligned, boxes_in_cells, cxcywh_to_xyxy, wh_iou
from models.heads import Anchors, Head, HeadMap

PAIRS_AT_ONCE = 2**18  # boxes x targets compared at once: temporaries of 1 MB fit a CPU's cache
WEIGHT_STEPS = 256  # weights are multiples of 1 / 256, so their sums are exact on any number of ranks
OVERLAP_POWER = 6  # exponent of the overlap in the alignment (Feng et al. 2021)
OVERLAP_COST = 3.0  # weight of -log IoU beside the cross-entropy, in the cost (Ge et al. 2021)
# YOLOX has 1. At first, small objects then get one and large ones up to ten, so rare small objects
# are not learnt in a few hundred steps (docs/results/notebook.md).
MIN_POSITIVES = 3
MIN_LOG = -100.0  # bounds a cross-entropy, as torch does
HASH_FACTOR = 0x5851F42D4C957F2D  # odd, of 64 bits: boxes with one hash are the same
NEVER = -math.inf  # the merit of what is never chosen


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


def positives_by_shape(
    targets: Tensor, anchors: Anchors, stride: int, shape: tuple[int, ...], iou_thresh: float
) -> tuple[Tensor, Cells, Tensor]:
    """Pair every target with each anchor of a head in the cell of its centre: p = t * a pairs.

    A pair is positive if, of all anchors in the .cfg, its anchor has the shape most like the
    target's (the first of equals), or if their shapes overlap by more than an iou_thresh below 1.
    A target without a size, such as a row that fills up a batch, is in no positive pair. Returns
    the weights (p,), 1 for positive pairs and 0 for others, the cells (p,) and the targets (p, 6).
    """
    overlap = wh_iou(targets[:, 4:6], anchors.all)
    most, anchor = overlap.max(1, keepdim=True)
    positive = (anchor == anchors.mask) & (most > 0)  # (t, a)
    if iou_thresh < 1:
        positive = positive | (overlap[:, anchors.mask] > iou_thresh)
    cells = Cells(*(index.expand(positive.shape).flatten() for index in centre_cells(targets, stride, shape)))
    return positive.to(targets.dtype).flatten(), cells, targets[:, None].expand(*positive.shape, 6).flatten(0, 1)


def centre_cells(targets: Tensor, stride: int, shape: tuple[int, ...]) -> Cells:
    """The cells (t, 1) that hold the centres of targets (t, 6), and every anchor (1, a).

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


@torch.no_grad()
def best_overlaps(boxes_xyxy: Tensor, targets: Tensor) -> Tensor:
    """The largest IoU (batch, n) of each box (batch, n, 4) with a target of its image, or 0.

    targets: (t, 6) image, class, cx, cy, w, h in the pixels of the boxes, in any order. They are
    compared with the boxes of their images a few at a time, to bound memory.
    """
    batch, count, _ = boxes_xyxy.shape
    best = boxes_xyxy.new_zeros(batch, count)
    most = max(1, PAIRS_AT_ONCE // count)
    for first in range(0, len(targets), most):  # Tensor.split of no rows does not compile before torch 2.11
        part = targets[first : first + most]
        image = part[:, 0].long()
        iou = box_iou_aligned(boxes_xyxy[image], cxcywh_to_xyxy(part[:, 2:])[:, None], IouKind.iou)
        best.scatter_reduce_(0, image[:, None].expand_as(iou), iou, reduce="amax")
    return best


@torch.no_grad()
def merge_classes(position: Tensor, weight: Tensor, classes: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Give each pair the classes, and the number, of the pairs at its position that count.

    position: int64 (p,); weight: (p,) 1 where a pair counts, else 0; classes: (p,). Returns the
    classes as (p, num_classes) of 0 and 1, and the number (p,), at least 1.
    """
    order = position.argsort()
    starts = position[order].diff(prepend=position.new_full((1,), -1)) != 0
    group = torch.empty_like(position).scatter_(0, order, starts.cumsum(0) - 1)
    there = weight.new_zeros(len(weight), num_classes)
    there.view(-1).scatter_reduce_(0, group * num_classes + classes.long(), weight, reduce="amax")
    return there[group], weight.new_zeros(len(weight)).scatter_add_(0, group, weight)[group].clamp(min=1)


@torch.no_grad()
def merge_labels(targets: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Make one target of all labels of a box: the first; the others become rows of zeros.

    targets: (t, 6) image, class, cx, cy, w, h. Returns them, and the classes of each box as
    (t, num_classes) of 0 and 1. Boxes are the same if they are equal to the bit.
    """
    image, _, *sides = targets.float().contiguous().view(torch.int32).long().unbind(1)
    box = image
    for side in sides:
        box = torch.add(side, box, alpha=HASH_FACTOR)  # modulo 2^64
    order = box.argsort(stable=True)
    starts = box[order].diff(prepend=box.new_full((1,), -1)) != 0
    is_first = torch.empty_like(starts).scatter_(0, order, starts)
    group = torch.empty_like(order).scatter_(0, order, starts.cumsum(0) - 1)
    there = targets.new_zeros(len(targets), num_classes)
    there.view(-1).scatter_(0, group * num_classes + targets[:, 1].long(), 1.0)
    return targets * is_first[:, None], there[group]


@torch.no_grad()
def dynamic_positives(
    maps: Sequence[HeadMap], targets: Tensor, count: int, by: PositivesBy
) -> list[tuple[Tensor, Cells]]:
    """The anchors of cells, of all heads together, that learn each target.

    targets: (t, 6) image, class, cx, cy, w, h in pixels. Returns for each head the weights (t, p)
    of its p candidates, 0 where one is not chosen, and their cells. ``by`` ranks the candidates:

    - alignment: by score * IoU^6, where score is objectness * class probability, highest first.
      ``count`` are chosen; their weight is this product as a share of the target's largest.
    - cost: by the cross-entropy of the roots of all scores plus 3 * -log IoU, lowest first. As many
      are chosen as the ``count`` largest overlaps add up to, rounded down, but at least
      MIN_POSITIVES; their weight is 1.

    Of equals the first is chosen, in the order of heads, anchors, rows, columns. If several targets
    choose an anchor of a cell, it learns the one that it overlaps most, or that costs least.
    Targets without a size and candidates without an overlap are never chosen.
    """
    candidates = [_candidates(head, raw.shape, targets) for head, _, raw in maps]
    places = [cells for _, cells in candidates]
    overlaps, merits = _overlaps_and_merits(maps, candidates, targets, by)
    if by == PositivesBy.cost:
        largest = overlaps.sort(dim=1, descending=True).values[:, :count]
        numbers = largest.sum(1, keepdim=True).floor().clamp(min=min(count, MIN_POSITIVES))
    else:
        numbers = overlaps.new_full((), count)
    best = merits.argsort(dim=1, descending=True, stable=True)
    chosen = torch.empty_like(best).scatter_(1, best, torch.arange(best.shape[1], device=best.device).expand_as(best))
    rivals = torch.where((chosen < numbers) & (merits > NEVER), merits if by == PositivesBy.cost else overlaps, NEVER)
    won = _without_rivals(maps, places, rivals)
    weights = won.to(merits.dtype)
    if by != PositivesBy.cost:
        winners = torch.where(won, merits, 0)
        shares = winners / winners.amax(1, keepdim=True).clamp(min=torch.finfo(winners.dtype).tiny)
        weights = shares.mul(WEIGHT_STEPS).round() / WEIGHT_STEPS
    return list(zip(weights.split([cells.anchor.shape[1] for cells in places], dim=1), places, strict=True))


def _without_rivals(maps: Sequence[HeadMap], places: Sequence[Cells], merits: Tensor) -> Tensor:
    """Whether each candidate (t, n) is a positive: no other target has more merit at its place."""
    positions, start = [], 0
    for (_, _, raw), cells in zip(maps, places, strict=True):
        positions.append(cells.flat(raw.shape) + start)
        start += raw.shape[:4].numel()
    position = torch.cat(positions, dim=1)
    most = merits.new_full((start,), NEVER)
    most.scatter_reduce_(0, position.flatten(), merits.flatten(), reduce="amax")
    return (merits >= most[position]) & (merits > NEVER)


def _candidates(head: Head, shape: tuple[int, ...], targets: Tensor) -> tuple[Tensor, Cells]:
    """Whether anchors of the cells around the centres can reach these (t, p), and the cells."""
    reach = (head.scale_x_y - 1) / 2  # beyond the cell, in cells
    steps = torch.arange(-math.ceil(reach), math.ceil(reach) + 1, device=targets.device)
    rows_on, columns_on = (steps.flatten() for steps in torch.meshgrid(steps, steps, indexing="ij"))
    image, anchor, row, column = centre_cells(targets, head.stride, shape)
    rows, columns = row + rows_on, column + columns_on  # (t, m)
    reached = (rows >= 0) & (rows < shape[2]) & (columns >= 0) & (columns < shape[3]) & (targets[:, 4:5] > 0)
    for centre, corner in ((targets[:, 2:3], columns), (targets[:, 3:4], rows)):
        offset = centre / head.stride - corner
        reached &= (offset > -reach) & (offset < 1 + reach)
    pairs = (len(targets), anchor.shape[1], reached.shape[1])  # targets, anchors, cells around the centre
    inside = rows.clamp(0, shape[2] - 1), columns.clamp(0, shape[3] - 1)
    indices = (image[:, None], anchor[..., None], *(index[:, None] for index in inside))
    return reached[:, None].expand(pairs).flatten(1), Cells(*(index.expand(pairs).flatten(1) for index in indices))


def _overlaps_and_merits(
    maps: Sequence[HeadMap], candidates: Sequence[tuple[Tensor, Cells]], targets: Tensor, by: PositivesBy
) -> tuple[Tensor, Tensor]:
    """The IoU (t, n) of the boxes that all candidates predict with their targets, and merits."""
    parts = []
    for (head, anchors, raw), (reached, cells) in zip(maps, candidates, strict=True):
        coordinates, objectness, classes = head.split(at_least_float32(raw[tuple(cells)]))  # (t, p, ...)
        boxes = boxes_in_cells(coordinates, anchors.own[cells.anchor], head)
        parts.append((reached, objectness, classes, boxes, targets_in_cells(targets, cells, head.stride)))
    # Joined, because an accelerator computes a long row as fast as a short one.
    reached, there, classes, boxes, wanted = (torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True))
    iou = box_iou_aligned(boxes, wanted, IouKind.iou).clamp(min=0)
    overlap = torch.where(reached, iou, 0)
    log_sigmoid = nn.functional.logsigmoid
    logs = log_sigmoid(there) + log_sigmoid(classes)  # of scores (t, p, classes)
    labels = targets[:, None, 1:2].long().expand(*overlap.shape, 1)
    if by == PositivesBy.alignment:
        merit = logs.gather(2, labels)[..., 0].exp() * overlap**OVERLAP_POWER
    else:
        roots = logs / 2
        misses = torch.log1p(-roots.exp()).clamp(min=MIN_LOG)
        true = (roots.clamp(min=MIN_LOG) - misses).gather(2, labels)[..., 0]
        merit = misses.sum(-1) + true + OVERLAP_COST * overlap.log()
    return overlap, torch.where(overlap > 0, merit, NEVER)
