"""What the loops need of a batch, whoever makes it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class NetworkInput(Protocol):
    """What a forward pass needs of a batch."""

    images: Tensor  # uint8 (B, 3, H, W)

    def to(self, device: torch.device, non_blocking: bool = False) -> NetworkInput:
        """The same on ``device``."""
        ...


class ImageBatch(NetworkInput, Protocol):
    """What training and scoring need of a batch: see data.Batch."""

    targets: Tensor  # float32 (T, 6): image in the batch, class, cx, cy, w, h in pixels
    indices: Tensor  # int64 (B,) positions in the data set

    def to(self, device: torch.device, non_blocking: bool = False) -> ImageBatch:
        """The same on ``device``."""
        ...
