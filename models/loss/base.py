"""What the losses share: terms of box, objectness and class for each head, and their sums."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from models.loss.assignment import Anchors, HeadAnchors
from models.network.heads import Head

Terms = tuple[Tensor, Tensor, Tensor]  # scalars: box, objectness, classification
SumOverRanks = Callable[[Tensor], Tensor]


class LossParts(NamedTuple):
    """Scalars: `total` for backward, and its three weighted summands, detached, for the log."""

    total: Tensor
    box: Tensor
    objectness: Tensor
    classification: Tensor


class HeadMap(NamedTuple):
    """A head, its anchors and its raw map."""

    head: Head
    anchors: Anchors
    raw: Tensor


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
