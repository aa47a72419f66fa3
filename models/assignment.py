"""Assign targets to cells and anchors. Nothing here synchronises with the host.

Predictions choose several positives for each object, as in task-aligned one-stage detection (Feng
et al. 2021, section 3.2) or SimOTA (YOLOX, Ge et al. 2021, section 2.1). The candidates are the
anchors of all cells from which decoding reaches its centre: its own and, if scale_x_y > 1, others.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from models.config import IouKind, PositivesBy
from models.decode import at_least_float32, box_iou_aligned, boxes_in_cells, cxcywh_to_xyxy
from models.heads import HeadMap

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


class Predictions(NamedTuple):
    """What anchors of cells predict for targets; boxes in pixels from the corners of the cells."""

    cells: Cells
    coordinates: Tensor  # raw, (t, p, 4 or 4 * box_bins)
    objectness: Tensor  # logits (t, p, 1)
    classes: Tensor  # logits (t, p, classes)
    boxes_xyxy: Tensor  # (t, p, 4)
    wanted_xyxy: Tensor  # of the targets, (t, p, 4)


Candidates = tuple[Tensor, Predictions]  # which of them the decoding can reach the target's centre from


def centre_cells(part: HeadMap, targets: Tensor) -> Cells:
    """The cells (t, 1) that hold the centres of targets (t, 6), and every anchor (1, a).

    A centre on the image's far edge belongs to the last cell.
    """
    _, anchors, rows, columns = part.raw.shape[:4]
    column, row = (targets[:, 2:4] / part.head.stride).floor().long().split(1, dim=1)
    anchor = torch.arange(anchors, device=targets.device)[None]
    return Cells(targets[:, :1].long(), anchor, row.clamp(0, rows - 1), column.clamp(0, columns - 1))


def predictions(part: HeadMap, cells: Cells, targets: Tensor) -> Predictions:
    """What the anchors of the cells predict for targets (t, 6)."""
    head, anchors, raw = part
    coordinates, objectness, classes = head.split(at_least_float32(raw[tuple(cells)]))
    boxes = boxes_in_cells(coordinates, anchors.own[cells.anchor], head)
    centres = targets[:, None, 2:4] - torch.stack((cells.column, cells.row), -1) * head.stride
    halves = targets[:, None, 4:6] / 2
    wanted = torch.cat((centres - halves, centres + halves), -1)
    return Predictions(cells, coordinates, objectness, classes, boxes, wanted)


@torch.no_grad()
def best_overlaps(boxes_xyxy: Tensor, targets: Tensor) -> Tensor:
    """The largest IoU (batch, n) of each box (batch, n, 4) with a target (t, 6) of its image, or 0.

    Targets are compared a few at a time, to bound memory.
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
def merge_classes(keys: Tensor, weight: Tensor, classes: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """The classes of all elements with the same key, and whether each is the first of these.

    keys: int64 (...); weight: (...) 1 where an element counts, else 0; classes: broadcastable.
    Returns the classes as (..., num_classes) of 0 and 1, and bool (n,) of the flattened elements.
    """
    flat = keys.flatten()
    order = flat.argsort(stable=True)
    starts = flat[order].diff(prepend=flat.new_full((1,), -1)) != 0
    is_first = torch.empty_like(starts).scatter_(0, order, starts)
    group = torch.empty_like(order).scatter_(0, order, starts.cumsum(0)).view_as(keys)
    place = group * num_classes + classes.long()
    there = weight.new_zeros(len(flat) + 1, num_classes)
    there.view(-1).scatter_reduce_(0, place.flatten(), weight.flatten(), reduce="amax")
    return there[group], is_first


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
    classes, is_first = merge_classes(box, targets.new_ones(len(targets)), targets[:, 1], num_classes)
    return targets * is_first[:, None], classes


def candidates(part: HeadMap, targets: Tensor) -> Candidates:
    """Which anchors of cells around centres of targets (t, 6) reach them, and what they predict.

    The first is bool (t, p), where p goes by anchor, row and column.
    """
    head, _, raw = part
    reach = (head.scale_x_y - 1) / 2  # beyond the cell, in cells
    steps = torch.arange(-math.ceil(reach), math.ceil(reach) + 1, device=targets.device)
    image, anchor, row, column = centre_cells(part, targets)
    anchors, down, right = torch.cartesian_prod(anchor[0], steps, steps).unbind(1)  # (p,)
    row = row + down
    column = column + right
    reached = targets[:, 4:5] > 0
    inside = []
    for axis, cell, count in ((3, row, raw.shape[2]), (2, column, raw.shape[3])):
        offset = targets[:, axis, None] / head.stride - cell
        reached = reached & (cell >= 0) & (cell < count) & (offset > -reach) & (offset < 1 + reach)
        inside.append(cell.clamp(0, count - 1))
    return reached, predictions(part, Cells(image, anchors, *inside), targets)


@torch.no_grad()
def dynamic_positives(
    maps: Sequence[HeadMap], found: Sequence[Candidates], targets: Tensor, count: int, by: PositivesBy
) -> Sequence[Tensor]:
    """The weights (t, p) with which the candidates found on each map learn the targets, or 0.

    targets: (t, 6) image, class, cx, cy, w, h in pixels. ``by`` ranks the candidates:

    - alignment: by score * IoU^6, where score is objectness * class probability, highest first.
      ``count`` are chosen; their weight is this product as a share of the target's largest.
    - cost: by the cross-entropy of the roots of all scores plus 3 * -log IoU, lowest first. As many
      are chosen as the ``count`` largest overlaps add up to, rounded down, but at least
      MIN_POSITIVES; their weight is 1.

    Of equals the first is chosen, in the order of heads, anchors, rows, columns. If several targets
    choose an anchor of a cell, it learns the one that it overlaps most, or that costs least.
    Targets without a size and candidates without an overlap are never chosen.
    """
    # Joined, because an accelerator computes a long row as fast as a short one.
    parts = [(reached, *predicted[2:]) for reached, predicted in found]  # without cells and coordinates
    joined = [torch.cat(part, 1) for part in zip(*parts, strict=True)]
    reached, objectness, classes, boxes, wanted = joined
    overlaps = torch.where(reached, box_iou_aligned(boxes, wanted, IouKind.iou), 0)  # (t, n)
    logs = logsigmoid(objectness) + logsigmoid(classes)  # of scores (t, n, classes)
    labels = targets[:, None, 1:2].long().expand(*overlaps.shape, 1)
    if by == PositivesBy.alignment:
        merits = logs.gather(2, labels)[..., 0].exp() * overlaps**OVERLAP_POWER
        numbers: Tensor | int = count
    else:
        roots = logs / 2
        misses = torch.log1p(-roots.exp()).clamp(min=MIN_LOG)
        true = (roots.clamp(min=MIN_LOG) - misses).gather(2, labels)[..., 0]
        merits = misses.sum(-1) + true + OVERLAP_COST * overlaps.log()
        largest = overlaps.sort(dim=1, descending=True).values[:, :count]
        numbers = largest.sum(1, keepdim=True).floor().clamp(min=min(count, MIN_POSITIVES))
    merits = torch.where(overlaps > 0, merits, NEVER)
    rank = merits.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    rivals = overlaps if by == PositivesBy.alignment else merits
    rivals = torch.where((rank < numbers) & (merits > NEVER), rivals, NEVER)
    places = []
    num_places = 0
    for part, (_, predicted) in zip(maps, found, strict=True):
        places.append(predicted.cells.flat(part.raw.shape) + num_places)
        num_places += part.raw.shape[:4].numel()
    place = torch.cat(places, 1)
    most = merits.new_full((num_places,), NEVER)
    most.scatter_reduce_(0, place.flatten(), rivals.flatten(), reduce="amax")
    won = (rivals >= most[place]) & (rivals > NEVER)
    weights = won.to(merits.dtype)
    if by == PositivesBy.alignment:
        winners = torch.where(won, merits, 0)
        shares = winners / winners.amax(1, keepdim=True).clamp(min=torch.finfo(winners.dtype).tiny)
        weights = shares.mul(WEIGHT_STEPS).round() / WEIGHT_STEPS
    of_maps: Sequence[Tensor] = weights.split([part.shape[1] for part in places], 1)
    return of_maps
