"""What all losses share, and the YOLOv3-SPP loss.

YoloLoss has the formulation of the first PyTorch YOLOv3-SPP (ultralytics/yolov3, branch archive):
every anchor of every head whose shape fits a target is positive in the cell that holds the target's
centre. With ``positives`` the predictions choose instead. In that formulation each term is a sum of
means, one of each head; ``balance`` has other sums.

All arithmetic is in float32, or in float64 for float64 maps. Shapes depend only on the number of
targets (no boolean indexing), so a step on an accelerator never waits for the host.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.assignment import Cells, centre_cells, dynamic_positives, targets_in_cells
from models.config import AUTO, PUBLISHED_LOSS, Balance, LossConfig
from models.decode import at_least_float32, box_iou_aligned, boxes_in_cells, wh_iou
from models.errors import ModelError
from models.heads import Head, HeadAnchors, HeadMap

Terms = tuple[Tensor, Tensor, Tensor]  # scalars: box, objectness, classification
SumOverRanks = Callable[[Tensor], Tensor]
# Elementwise, of logits and targets; its gradient is probability - target.
cross_entropy = partial(nn.functional.binary_cross_entropy_with_logits, reduction="none")


class LossParts(NamedTuple):
    """Scalars: `total` for backward, and its three weighted summands, detached, for the log."""

    total: Tensor
    box: Tensor
    objectness: Tensor
    classification: Tensor


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
        sum_over_ranks: SumOverRanks = lambda tensor: tensor,
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
            total = box + objectness + classification
            return LossParts(total, box.detach(), objectness.detach(), classification.detach())

    @abstractmethod
    def _terms(
        self, maps: list[HeadMap], targets: Tensor, ratio: float, sum_over_ranks: SumOverRanks, world_size: int
    ) -> tuple[list[Terms], Sequence[float | Tensor]]:
        """The terms of each head, and the factors of the three kinds; ratio: objectness_ratio."""


class YoloLoss(HeadLoss):
    """The loss that `config` describes, averaged over the positives of the global micro-batch."""

    def __init__(self, heads: Sequence[Head], config: LossConfig) -> None:
        super().__init__(heads)
        self.config = config
        weights, classes = config.class_weights, self.heads[0].num_classes
        if isinstance(weights, list) and len(weights) != classes:
            raise ModelError(f"loss.class_weights has {len(weights)} numbers for {classes} classes. fix: one for each")
        self._class_weights = torch.tensor(weights) if isinstance(weights, list) else None

    def _terms(
        self, maps: list[HeadMap], targets: Tensor, ratio: float, sum_over_ranks: SumOverRanks, world_size: int
    ) -> tuple[list[Terms], Sequence[float | Tensor]]:
        config, count = self.config, len(maps)
        # For each head weights (t, p), 0 where a target is not learnt, and the p candidates
        if config.positives is not None:
            pairs = dynamic_positives(maps, targets, config.positives, config.ranked_by)
        else:
            pairs = []
            for head, anchors, raw in maps:
                matches = wh_iou(targets[:, 4:6], anchors.own) > config.anchor_iou
                weight = matches.to(at_least_float32(raw).dtype)
                pairs.append((weight, centre_cells(targets, head.stride, raw.shape)))
        positives = sum_over_ranks(torch.stack([weight.sum() for weight, _ in pairs]))
        cells: list[float] = [part.raw[..., 4].numel() * world_size for part in maps]
        if config.balance == Balance.pooled:  # each head counts as if all had equally many
            positives, cells = positives.mean().expand(count), [sum(cells) / count] * count
        elif config.balance == Balance.damped:
            positives = positives.maximum(positives.mean())
        shares = 1 / positives.clamp(min=1)  # without positives the terms are 0, not 0 / 0
        terms = [self._head_terms(*each, targets, ratio) for each in zip(maps, pairs, shares, cells, strict=True)]
        # Before a training set is known, auto is the published recipe's.
        gain = PUBLISHED_LOSS["classification"] if config.classification == AUTO else config.classification
        return terms, (config.box, config.objectness, gain * self.heads[0].num_classes / 80)

    def _head_terms(
        self, part: HeadMap, pairs: tuple[Tensor, Cells], share: Tensor, num_cells: float, targets: Tensor, ratio: float
    ) -> Terms:
        """The terms of one head, without gains; a positive weighs share, a cell 1 / num_cells."""
        config, (head, anchors, raw), (weight, cells) = self.config, part, pairs
        # (t, p, 5 + classes), one row for each pair, matched or not
        predicted = at_least_float32(raw[tuple(cells)])
        xy, wh, _, class_logits = predicted.split((2, 2, 1, head.num_classes), dim=-1)
        boxes = boxes_in_cells(xy, wh, anchors.own[cells.anchor], head)
        iou = box_iou_aligned(boxes, targets_in_cells(targets, cells, head.stride), config.iou)
        box = ((1 - iou) * weight).sum() * share

        quality = 1 - ratio + ratio * iou.detach().clamp(min=0)
        # If several targets claim one anchor of one cell, the largest quality counts, whatever
        # their order; the box and class terms count each. Pairs that do not match write 0.
        wanted = weight.new_zeros(raw.shape[:4])
        places = cells.flat(raw.shape).flatten()
        wanted.view(-1).scatter_reduce_(0, places, (quality * weight).flatten(), reduce="amax")
        objectness = cross_entropy(at_least_float32(raw[..., 4]), wanted).sum() / num_cells

        # Even a single class is learnt: decoding multiplies by its probability, as in Darknet.
        labels = targets[:, 1:2].long()
        classes = labels[..., None] == torch.arange(head.num_classes, device=raw.device)  # (t, 1, classes)
        losses = cross_entropy(class_logits, classes.to(class_logits.dtype).expand_as(class_logits))
        if self._class_weights is not None:
            self._class_weights = self._class_weights.to(raw.device)  # once, because the copy blocks
            weight = weight * self._class_weights[labels]
        return box, objectness, (losses.mean(-1) * weight).sum() * share
