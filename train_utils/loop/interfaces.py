"""The interfaces through which the loops see a batch and a loss, whoever makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

SumOverRanks = Callable[[Tensor], Tensor]  # a tensor of one shape on all ranks -> its sum over them


class NetworkInput(Protocol):
    """What a forward pass needs of a batch."""

    images: Tensor  # uint8 (B, 3, H, W)

    def to(self, device: torch.device, non_blocking: bool = False) -> NetworkInput:
        """Copy to ``device``."""
        ...


class ImageBatch(NetworkInput, Protocol):
    """What training and scoring need of a batch: see data.Batch."""

    targets: Tensor  # float32 (T, 6): image in the batch, class, cx, cy, w, h in pixels
    indices: Tensor  # int64 (B,) positions in the data set

    def to(self, device: torch.device, non_blocking: bool = False) -> ImageBatch:
        """Copy to ``device``."""
        ...


class LossParts(Protocol):
    """Scalars in the order of run_state.LOSS_NAMES; the first is ``total``."""

    @property
    def total(self) -> Tensor:
        """The rank's share of the loss, for backward; shares of all ranks add up."""
        ...

    def __iter__(self) -> Iterator[Tensor]: ...


class Loss(Protocol):
    """The loss of one micro-batch; models.YoloLoss and models.DarknetLoss are two.

    ``raw_maps`` are the network's outputs and ``targets`` those of ``ImageBatch``. Over burn-in
    ``objectness_ratio`` rises from 0 to 1. The loss calls ``sum_over_ranks`` exactly once, so ranks
    stay in step; ``world_size`` ranks have equally many images.
    """

    def __call__(
        self,
        raw_maps: Sequence[Tensor],
        targets: Tensor,
        *,
        objectness_ratio: float,
        sum_over_ranks: SumOverRanks,
        world_size: int,
    ) -> LossParts:
        """The parts of this rank's loss."""
        ...
