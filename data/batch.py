"""A batch: its tensors, the memory they lie in, and its way from a worker to the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from data.colour import network_input
from data.errors import DataError
from data.geometry import Boxes
from data.plan import Request

# The fields that travel to a device. With the others, always on the host, it names images and maps
# detections back to them.
OF_THE_DEVICE = ("images", "targets", "gains")


@dataclass
class Batch:
    """B samples of one size with T boxes in all."""

    images: Tensor  # uint8 (B, 3, H, W) RGB, in channels-last memory
    targets: Tensor  # float32 (T, 6): position in the batch, class, cx, cy, w, h in pixels of these images
    indices: Tensor  # int64 (B,) positions in the data set
    letterboxes: Tensor  # float64 (B, 4) ratio_x, ratio_y, pad_x, pad_y; (0, 4) for training samples
    gains: Tensor  # float32 (B, 3) of hue, saturation and value, for network_input to apply; (0, 3): none

    def network_input(self) -> Tensor:
        """The images as floats in 0..1, with the gains applied, on the batch's device."""
        return network_input(self.images, self.gains)

    def pin_memory(self) -> Batch:
        """The batch with what the device needs in page-locked memory; the loader calls this."""
        return replace(self, **{name: getattr(self, name).pin_memory() for name in OF_THE_DEVICE})

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The batch with what the network and the loss need on a device."""
        moved = {name: getattr(self, name).to(device, non_blocking=non_blocking) for name in OF_THE_DEVICE}
        return replace(self, **moved)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory on the device until what ``stream`` has queued by its release is done."""
        for name in OF_THE_DEVICE:
            getattr(self, name).record_stream(stream)

    def __reduce__(self) -> tuple[Callable[..., Batch], tuple[Any, ...]]:
        # From a worker only the images travel as shared memory: for each such tensor the training
        # process asks the worker, which is busy with the next batch.
        return _receive, (self.images, *(getattr(self, field.name).numpy() for field in fields(self)[1:]))


def _receive(images: Tensor, *others: NDArray[Any]) -> Batch:
    return Batch(images, *map(torch.from_numpy, others))


def empty_images(requests: Sequence[Request]) -> Tensor:
    """Return uninitialised memory for the images of a batch, uint8 (B, H, W, 3).

    In a worker it is shared with the training process. Raises ``DataError`` where there is no more.
    """
    sizes = {(request.height, request.width) for request in requests}
    assert len(sizes) == 1, "one size per batch"
    shape = (len(requests), *sizes.pop(), 3)
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    # As torch's own collate function does: a tensor that is not shared yet would be copied when it
    # is sent.
    try:
        storage: torch.UntypedStorage = torch.UntypedStorage._new_shared(math.prod(shape))
    except RuntimeError as error:
        raise DataError(
            f"no shared memory for a batch of {math.prod(shape) / 1e6:.0f} MB ({error}). fix: make /dev/shm larger (in "
            "a container: --shm-size=8g), or lower data.workers; 0 does without"
        ) from error
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)


def target_rows(samples: NDArray[np.int64], classes: NDArray[np.int32], boxes_xyxy: Boxes) -> NDArray[np.float32]:
    """Rows (T, 6) of sample, class, cx, cy, w, h."""
    low, high = boxes_xyxy[:, :2], boxes_xyxy[:, 2:]
    columns = (samples[:, None], classes[:, None], (low + high) / 2, high - low)
    return np.concatenate(columns, axis=1, dtype=np.float32)


def make_batch(buffer: Tensor, requests: Sequence[Request], targets: NDArray[np.float32], **more: Tensor) -> Batch:
    """The batch of images (B, H, W, 3) and targets; what ``more`` leaves out is empty."""
    nothing = {"letterboxes": torch.empty((0, 4), dtype=torch.float64), "gains": torch.empty((0, 3))}
    return Batch(
        images=buffer.permute(0, 3, 1, 2),
        targets=torch.from_numpy(targets),
        indices=torch.tensor([request.index for request in requests]),
        **nothing | more,
    )
