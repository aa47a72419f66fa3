"""An assigner: an object is learnt by its best anchor alone, also in the nearest neighbour cells.

``python train.py plugins=[best_assigner.py]``; it acts in ``loss=yolov3``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models import Head
from models.boxes import wh_iou
from models.loss.assignment import Anchors, Cells, centre_cells
from plugins import assigner


@dataclass
class Best:
    """How many cells learn an object."""

    neighbours: bool = True  # also the nearest cell to the left or right, and above or below


@assigner("best", Best)
def best(head: Head, anchors: Anchors, raw: Tensor, targets: Tensor, options: Best) -> tuple[Tensor, Cells]:
    """Weights (t, p) and cells of p pairs for each of t targets: image, class, cx, cy, w, h."""
    nearest = wh_iou(targets[:, 4:6], anchors.all).argmax(1, keepdim=True)  # (t, 1)
    cells = centre_cells(targets, head.stride, raw.shape)
    weight = ((nearest == anchors.mask) & (targets[:, 4:5] > 0)).float()  # (t, a); rows of zeros fill up batches
    if not options.neighbours:
        return weight, cells
    rows, columns = raw.shape[2:4]
    x, y = (targets[:, 2:4] / head.stride).split(1, dim=1)
    row = cells.row + torch.where(y - cells.row < 0.5, -1, 1)
    column = cells.column + torch.where(x - cells.column < 0.5, -1, 1)
    there_r, there_c = ((row >= 0) & (row < rows)).float(), ((column >= 0) & (column < columns)).float()
    weights = torch.cat((weight, weight * there_r, weight * there_c), dim=1)  # (t, 3 a)
    count = len(head.mask)
    all_rows = torch.cat((cells.row, row.clamp(0, rows - 1), cells.row), dim=1).repeat_interleave(count, 1)
    all_columns = torch.cat((cells.column, cells.column, column.clamp(0, columns - 1)), dim=1)
    return weights, Cells(cells.image, cells.anchor.repeat(1, 3), all_rows, all_columns.repeat_interleave(count, 1))
