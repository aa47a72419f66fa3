"""The YOLOv3-SPP loss: wh-IoU assignment, an IoU box term, objectness and class cross-entropies.

Formulation of the first PyTorch YOLOv3-SPP (ultralytics/yolov3, branch archive): every anchor of
every head whose shape fits a target is positive in the cell that holds the target's centre. All
arithmetic is in float32, or in float64 for float64 maps. Shapes depend only on the number of
targets (no boolean indexing), so a step on an accelerator never waits for the host.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.boxes import at_least_float32, box_iou_aligned, cxcywh_to_xyxy, wh_iou
from models.config import LossConfig
from models.decode import box_sizes, cell_offsets
from models.errors import ModelError
from models.loss.assignment import Anchors, Cells, centre_cells
from models.loss.base import HeadLoss, HeadMap, SumOverRanks, Terms
from models.network.heads import Head

FOCAL_ALPHA = 0.25  # weight of positives in the focal loss (Lin et al. 2017), their best value


class _Assignment(NamedTuple):
    """Which targets belong to which anchors of one head; t targets, a anchors."""

    weight: Tensor  # float (t, a): 1 where target and anchor match, else 0
    cells: Cells  # image (t, 1), anchor (1, a), row (t, 1), column (t, 1)
    anchors: Tensor  # (a, 2) in pixels
    boxes_xyxy: Tensor  # (t, 1, 4) in pixels, relative to the corner of the target's cell
    classes: Tensor  # (t, 1) int64


# Which of p anchors of cells learn each target, for one head: weights (t, p), 1 or 0, and the cells
# (broadcast to (t, p)). It takes the head, its anchors, the raw map without gradient and targets
# (t, 6). Its shapes depend on shapes only.
Assigner = Callable[[Head, Anchors, Tensor, Tensor], tuple[Tensor, Cells]]
ASSIGNERS: dict[str, Assigner] = {}  # at most one, of the plugins in use


class YoloLoss(HeadLoss):
    """The loss that `config` describes, averaged over the positives of the global micro-batch."""

    def __init__(self, heads: Sequence[Head], config: LossConfig) -> None:
        super().__init__(heads)
        self.config = config
        if len(ASSIGNERS) > 1:
            raise ModelError(f"the assigners {' and '.join(ASSIGNERS)} exclude one another. fix: the plugin of one")
        self.assign = next(iter(ASSIGNERS.values()), None)

    def _terms(
        self, maps: list[HeadMap], targets: Tensor, ratio: float, sum_over_ranks: SumOverRanks, world_size: int
    ) -> tuple[list[Terms], Sequence[float | Tensor]]:
        assigned = [self._assign(head, anchors, raw, targets) for head, anchors, raw in maps]
        counts = sum_over_ranks(torch.stack([assignment.weight.sum() for assignment in assigned]))
        shares = 1 / counts.clamp(min=1)  # without positives the terms are 0, not 0 / 0
        terms = [
            self._head_terms(head, raw, assignment, share, ratio, world_size)
            for (head, _, raw), assignment, share in zip(maps, assigned, shares, strict=True)
        ]
        config = self.config
        return terms, (config.box, config.objectness, config.class_weight * self.heads[0].num_classes / 80)

    def _assign(self, head: Head, anchors: Anchors, raw: Tensor, targets: Tensor) -> _Assignment:
        """Match targets with the anchors of one head, by shape, in the cell of the centre."""
        centre, size = targets[:, 2:4], targets[:, 4:6]
        cells = centre_cells(targets, head.stride, raw.shape)
        if self.assign is not None:
            return self._assigned(head, anchors, raw, targets)
        corner = torch.cat((cells.column, cells.row), dim=1) * head.stride
        return _Assignment(
            weight=(wh_iou(size, anchors.own) > self.config.anchor_iou).to(at_least_float32(raw).dtype),
            cells=cells,
            anchors=anchors.own,
            boxes_xyxy=cxcywh_to_xyxy(torch.cat((centre - corner, size), dim=1))[:, None],
            classes=targets[:, 1:2].long(),
        )

    def _assigned(self, head: Head, anchors: Anchors, raw: Tensor, targets: Tensor) -> _Assignment:
        """What the assigner chooses."""
        assert self.assign is not None
        weight, cells = self.assign(head, anchors, raw.detach(), targets)
        corners = torch.stack(torch.broadcast_tensors(cells.column, cells.row), dim=-1) * head.stride
        centres = targets[:, None, 2:4] - corners
        sizes = targets[:, None, 4:6].expand_as(centres)
        return _Assignment(
            weight=weight.to(at_least_float32(raw).dtype),
            cells=cells,
            anchors=anchors.own[cells.anchor],
            boxes_xyxy=cxcywh_to_xyxy(torch.cat((centres, sizes), dim=-1)),
            classes=targets[:, 1:2].long(),
        )

    def _head_terms(
        self, head: Head, raw: Tensor, assigned: _Assignment, share: Tensor, objectness_ratio: float, world_size: int
    ) -> Terms:
        """The terms of one head, without gains. `share` is the weight of one positive."""
        config = self.config
        # (t, a, 5 + classes), one row for each pair, matched or not
        predicted = at_least_float32(raw[tuple(assigned.cells)])
        xy, wh, _, class_logits = predicted.split((2, 2, 1, head.num_classes), dim=-1)
        # Relative to the cell's corner, like the targets: differences of large numbers lose digits.
        centre = cell_offsets(xy, head) * head.stride
        boxes = cxcywh_to_xyxy(torch.cat((centre, box_sizes(wh, assigned.anchors, head)), dim=-1))
        iou = box_iou_aligned(boxes, assigned.boxes_xyxy, config.iou)
        box = ((1 - iou) * assigned.weight).sum() * share

        quality = 1 - objectness_ratio + objectness_ratio * iou.detach().clamp(min=0)
        targets = _objectness_targets(raw, assigned, quality)
        logits = at_least_float32(raw[..., 4])
        objectness = self._cross_entropy(logits, targets, config.objectness_positive_weight).sum()
        objectness = objectness / (logits.numel() * world_size)

        # Even a single class is learnt: decoding multiplies by its probability, as in Darknet.
        wanted = assigned.classes[..., None] == torch.arange(head.num_classes, device=raw.device)  # (t, 1, classes)
        smoothed = wanted.to(class_logits.dtype) * (1 - config.label_smoothing) + config.label_smoothing / 2
        losses = self._cross_entropy(class_logits, smoothed.expand_as(class_logits), config.class_positive_weight)
        classification = (losses.mean(-1) * assigned.weight).sum() * share
        return box, objectness, classification

    def _cross_entropy(self, logits: Tensor, targets: Tensor, positive_weight: float) -> Tensor:
        """Elementwise binary cross-entropy, focal (Lin et al. 2017) if gamma is above 0."""
        weight = None if positive_weight == 1 else logits.new_full((), positive_weight)  # filled on the device
        losses = F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weight, reduction="none")
        if self.config.focal_gamma == 0:
            return losses
        # Soft targets interpolate between the two cases that the paper defines.
        probability = logits.sigmoid()
        miss = targets * (1 - probability) + (1 - targets) * probability
        alpha = targets * FOCAL_ALPHA + (1 - targets) * (1 - FOCAL_ALPHA)
        return losses * alpha * miss**self.config.focal_gamma


def _objectness_targets(raw: Tensor, assigned: _Assignment, quality: Tensor) -> Tensor:
    """Objectness targets (batch, anchors, rows, columns): the quality (t, a) of positives, or 0.

    If several targets claim one anchor of one cell, the largest quality counts, whatever the order
    of the targets. The box and class terms count each target.
    """
    position = assigned.cells.flat(raw.shape)  # (t, a)
    targets = quality.new_zeros(raw.shape[:4])
    # Pairs that do not match write 0, which changes no maximum.
    targets.view(-1).scatter_reduce_(0, position.flatten(), (quality * assigned.weight).flatten(), reduce="amax")
    return targets
