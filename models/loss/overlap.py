"""Assign each target to the anchors of cells whose predicted boxes overlap it most.

Positives that follow the predictions, several for each object and weighted by their quality, come
from task-aligned one-stage detection (Feng et al. 2021, section 3.2). Here the quality is the
overlap alone, and the candidates are anchors of the cells from which the decoding reaches the
centre of the object: its own cell, and its neighbours if scale_x_y is above 1.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from models.boxes import at_least_float32, box_iou_aligned
from models.config import IouKind
from models.decode import boxes_in_cells
from models.loss.assignment import Cells, centre_cells, targets_in_cells
from models.loss.base import HeadMap
from models.network.heads import Head

STEPS = 256  # weights are multiples of 1 / STEPS: their sums are exact, whatever the number of ranks


@torch.no_grad()
def most_overlapping(maps: Sequence[HeadMap], targets: Tensor, count: int) -> list[tuple[Tensor, Cells]]:
    """The ``count`` anchors of cells, of all heads together, that learn each target.

    targets: (t, 6) image, class, cx, cy, w, h in pixels. Returns for each head the weights (t, p)
    of its p candidates, and their cells. A weight is the square of the overlap, as a share of the
    largest with this target, and 0 for candidates that are not chosen. Of equals the first is
    chosen: heads, then anchors, rows, columns. An anchor of a cell that several targets choose
    learns the one that it overlaps most. A target without a size chooses none.
    """
    candidates = [_candidates(head, raw.shape, targets) for head, _, raw in maps]
    places = [cells for _, cells in candidates]
    overlaps = torch.cat(
        [
            torch.where(reached, _overlaps(part, cells, targets), 0)
            for part, (reached, cells) in zip(maps, candidates, strict=True)
        ],
        dim=1,
    )
    best = overlaps.argsort(dim=1, descending=True, stable=True)[:, :count]
    chosen = torch.zeros_like(overlaps).scatter_(1, best, overlaps.gather(1, best))
    widths = [cells.anchor.shape[1] for cells in places]
    own = [
        _without_rivals(part, cells, overlap)
        for part, cells, overlap in zip(maps, places, chosen.split(widths, dim=1), strict=True)
    ]
    largest = torch.cat(own, dim=1).amax(1, keepdim=True).clamp(min=torch.finfo(overlaps.dtype).tiny)
    weights = [(overlap / largest).square().mul(STEPS).round() / STEPS for overlap in own]
    return list(zip(weights, places, strict=True))


def _without_rivals(part: HeadMap, cells: Cells, chosen: Tensor) -> Tensor:
    """Overlaps (t, p), 0 where another target overlaps the same anchor of the same cell more."""
    position = cells.flat(part.raw.shape)
    most = chosen.new_zeros(part.raw.shape[:4].numel())
    most.scatter_reduce_(0, position.flatten(), chosen.flatten(), reduce="amax")
    return torch.where(chosen >= most[position], chosen, 0)


def _candidates(head: Head, shape: tuple[int, ...], targets: Tensor) -> tuple[Tensor, Cells]:
    """Whether each anchor of each cell about the centres (t, p) can reach them, and the cells."""
    reach = (head.scale_x_y - 1) / 2  # beyond the cell, in cells
    steps = torch.arange(-math.ceil(reach), math.ceil(reach) + 1, device=targets.device)
    rows_on, columns_on = (steps.flatten() for steps in torch.meshgrid(steps, steps, indexing="ij"))
    image, anchor, row, column = centre_cells(targets, head.stride, shape)
    rows, columns = row + rows_on, column + columns_on  # (t, m)
    reached = (rows >= 0) & (rows < shape[2]) & (columns >= 0) & (columns < shape[3]) & (targets[:, 4:5] > 0)
    for centre, corner in ((targets[:, 2:3], columns), (targets[:, 3:4], rows)):
        offset = centre / head.stride - corner
        reached &= (offset > -reach) & (offset < 1 + reach)
    reached |= (rows_on == 0) & (columns_on == 0) & (targets[:, 4:5] > 0)  # its own, also on an edge
    pairs = (len(targets), anchor.shape[1], reached.shape[1])  # targets, anchors, cells about the centre
    inside = rows.clamp(0, shape[2] - 1), columns.clamp(0, shape[3] - 1)
    indices = (image[:, None], anchor[..., None], *(index[:, None] for index in inside))
    return reached[:, None].expand(pairs).flatten(1), Cells(*(index.expand(pairs).flatten(1) for index in indices))


def _overlaps(part: HeadMap, cells: Cells, targets: Tensor) -> Tensor:
    """The IoU (t, p) of the boxes predicted at cells with their targets."""
    xy, wh = at_least_float32(part.raw[tuple(cells)])[..., :4].split(2, dim=-1)
    boxes = boxes_in_cells(xy, wh, part.anchors.own[cells.anchor], part.head)
    return box_iou_aligned(boxes, targets_in_cells(targets, cells, part.head.stride), IouKind.iou).clamp(min=0)
