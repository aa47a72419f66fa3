"""What all losses share, and the YOLOv3-SPP loss.

YoloLoss has the formulation of the first PyTorch YOLOv3-SPP (ultralytics/yolov3, branch archive):
every anchor of every head whose shape fits a target is positive in the cell that holds the target's
centre. With ``positives``, dynamic.py chooses by the predictions instead. In that formulation each
term is a sum of means, one of each head; ``balance`` has other sums.

All arithmetic is in float32, or in float64 for float64 maps. Shapes depend only on the number of
targets (no boolean indexing), so a step on an accelerator never waits for the host.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.assignment import Cells, HeadAnchors, HeadMap, centre_cells, targets_in_cells
from models.boxes import at_least_float32, box_iou_aligned, wh_iou
from models.config import Balance, LossConfig
from models.decode import boxes_in_cells
from models.dynamic import dynamic_positives
from models.errors import ModelError
from models.heads import Head

Terms = tuple[Tensor, Tensor, Tensor]  # scalars: box, objectness, classification
SumOverRanks = Callable[[Tensor], Tensor]


class LossParts(NamedTuple):
    """Scalars: `total` for backward, and its three weighted summands, detached, for the log."""

    total: Tensor
    box: Tensor
    objectness: Tensor
    classification: Tensor


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Elementwise binary cross-entropy; its gradient is probability - target."""
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none")


def identity(tensor: Tensor) -> Tensor:
    """Sum over a single rank."""
    return tensor


class HeadLoss(ABC):
    """A loss of raw maps against targets that adds up terms of all heads of one network."""

    def __init__(self, heads: Sequence[Head]) -> None:
        self.heads = list(heads)
        self._anchors = HeadAnchors(self.heads)

    def __call__(
        self,
        raw_maps: Sequence[Tensor],
        targets: Tensor,
        objectness_ratio: float = 1.0,
        sum_over_ranks: SumOverRanks = identity,
        world_size: int = 1,
    ) -> LossParts:
        """The loss of one micro-batch.

        raw_maps: as Darknet returns them, any float type.
        targets: float32 (t, 6): image index in the batch, class, cx, cy, w, h in pixels of the
            batch's images. A row of zeros counts for nothing.
        objectness_ratio: blends the objectness target of a positive from 1 (at 0) to its IoU (at
            1), in losses that have such targets.
        sum_over_ranks: sums a tensor over all ranks. It is called exactly once, with or without
            targets, so that ranks stay in step. Each positive and each image weighs the same as in
            a run on one rank, and the losses of all ranks add up.
        world_size: the number of ranks, all with equally many images.
        """
        with torch.autocast(device_type=targets.device.type, enabled=False):
            maps = [HeadMap(*parts) for parts in zip(self.heads, self._anchors[targets.device], raw_maps, strict=True)]
            terms, gains = self._terms(maps, targets.float(), objectness_ratio, sum_over_ranks, world_size)
            of_heads = zip(*terms, strict=True)
            summands = [torch.stack(parts).sum() * gain for parts, gain in zip(of_heads, gains, strict=True)]
            box, objectness, classification = summands
            return LossParts(box + objectness + classification, *(part.detach() for part in summands))

    @abstractmethod
    def _terms(
        self, maps: list[HeadMap], targets: Tensor, ratio: float, sum_over_ranks: SumOverRanks, world_size: int
    ) -> tuple[list[Terms], Sequence[float | Tensor]]:
        """The terms of each head, and the factors of the three kinds; ratio: objectness_ratio."""


class _Assignment(NamedTuple):
    """Which anchors of cells of one head learn t targets: p for each, of which some count."""

    weight: Tensor  # float (t, p): 1 where the target is learnt, else 0
    cells: Cells  # broadcastable to (t, p) each
    anchors: Tensor  # (p, 2) or (t, p, 2) in pixels
    boxes_xyxy: Tensor  # (t, p or 1, 4) in pixels, relative to the corner of the cell
    classes: Tensor  # (t, 1) int64


class YoloLoss(HeadLoss):
    """The loss that `config` describes, averaged over the positives of the global micro-batch."""

    def __init__(self, heads: Sequence[Head], config: LossConfig) -> None:
        super().__init__(heads)
        self.config = config
        self._class_weights: dict[torch.device, Tensor] = {}
        weights, classes = config.class_weights, self.heads[0].num_classes
        if isinstance(weights, list) and len(weights) != classes:
            raise ModelError(f"loss.class_weights has {len(weights)} numbers for {classes} classes. fix: one for each")

    def _weights_of(self, classes: Tensor) -> Tensor:
        """Factors (t, 1) on the class terms of targets of the classes (t, 1)."""
        device = classes.device
        if device not in self._class_weights:  # copied once, because the copy blocks
            self._class_weights[device] = torch.tensor(self.config.class_weights, device=device)
        return self._class_weights[device][classes]

    def _terms(
        self, maps: list[HeadMap], targets: Tensor, ratio: float, sum_over_ranks: SumOverRanks, world_size: int
    ) -> tuple[list[Terms], Sequence[float | Tensor]]:
        assigned = self._assign(maps, targets)
        config, count = self.config, len(maps)
        positives = sum_over_ranks(torch.stack([assignment.weight.sum() for assignment in assigned]))
        cells: list[float] = [part.raw[..., 4].numel() * world_size for part in maps]
        if config.balance == Balance.pooled:  # each head counts as if all had equally many
            positives, cells = positives.mean().expand(count), [sum(cells) / count] * count
        elif config.balance == Balance.damped:
            positives = positives.maximum(positives.mean())
        shares = 1 / positives.clamp(min=1)  # without positives the terms are 0, not 0 / 0
        terms = [self._head_terms(*each, ratio) for each in zip(maps, assigned, shares, cells, strict=True)]
        return terms, (config.box, config.objectness, config.class_weight * self.heads[0].num_classes / 80)

    def _assign(self, maps: list[HeadMap], targets: Tensor) -> list[_Assignment]:
        """Match targets with the anchors of each head."""
        config = self.config
        if config.positives is not None:
            pairs = dynamic_positives(maps, targets, config.positives, config.ranked_by)
        else:
            alike = [(wh_iou(targets[:, 4:6], part.anchors.own) > config.anchor_iou).float() for part in maps]
            cells = [centre_cells(targets, part.head.stride, part.raw.shape) for part in maps]
            pairs = list(zip(alike, cells, strict=True))
        return [
            _Assignment(
                weight=weight.to(at_least_float32(raw).dtype),
                cells=cells,
                anchors=anchors.own if config.positives is None else anchors.own[cells.anchor],
                boxes_xyxy=targets_in_cells(targets, cells, head.stride),
                classes=targets[:, 1:2].long(),
            )
            for (head, anchors, raw), (weight, cells) in zip(maps, pairs, strict=True)
        ]

    def _head_terms(
        self, part: HeadMap, assigned: _Assignment, share: Tensor, cells: float, objectness_ratio: float
    ) -> Terms:
        """The terms of one head, without gains; a positive weighs `share`, a cell 1 / `cells`."""
        config, (head, _, raw) = self.config, part
        # (t, p, 5 + classes), one row for each pair, matched or not
        predicted = at_least_float32(raw[tuple(assigned.cells)])
        xy, wh, _, class_logits = predicted.split((2, 2, 1, head.num_classes), dim=-1)
        iou = box_iou_aligned(boxes_in_cells(xy, wh, assigned.anchors, head), assigned.boxes_xyxy, config.iou)
        box = ((1 - iou) * assigned.weight).sum() * share

        quality = 1 - objectness_ratio + objectness_ratio * iou.detach().clamp(min=0)
        targets = _objectness_targets(raw, assigned, quality)
        logits = at_least_float32(raw[..., 4])
        objectness = cross_entropy(logits, targets).sum() / cells

        # Even a single class is learnt: decoding multiplies by its probability, as in Darknet.
        wanted = assigned.classes[..., None] == torch.arange(head.num_classes, device=raw.device)  # (t, 1, classes)
        losses = cross_entropy(class_logits, wanted.to(class_logits.dtype).expand_as(class_logits))
        learnt = assigned.weight
        if isinstance(config.class_weights, list):
            learnt = learnt * self._weights_of(assigned.classes)
        classification = (losses.mean(-1) * learnt).sum() * share
        return box, objectness, classification


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
