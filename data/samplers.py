"""Which images come when, at which size and on which rank.

The order of an epoch is that of the whole run; a rank takes its share of it. So a micro-batch, one forward pass over
all ranks, holds the same images at any number of ranks as long as its size over all of them is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, islice

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from data.dataset import Request
from data.errors import DataError
from data.transforms import scaled_size


class MultiScale:
    """The image size of each optimiser step, drawn uniformly from the multiples of ``stride`` in a range.

    A function of (seed, step) alone: all ranks agree on it, and so does a resumed run. Step 0 has the largest size, so
    that memory runs out at once or never. ``low`` and ``high`` are factors on ``image_size``; 1 and 1 fix the size.
    """

    def __init__(self, image_size: int, low: float, high: float, stride: int, seed: int) -> None:
        if image_size % stride:
            below = max(image_size // stride * stride, stride)
            raise DataError(
                f"train.image_size={image_size} is not a multiple of the network's stride {stride}. "
                f"fix: train.image_size={below} or {image_size // stride * stride + stride}"
            )
        self.stride = stride
        self.seed = seed
        self.smallest = max(1, round(image_size * low / stride))  # in strides
        self.largest = max(1, round(image_size * high / stride))

    def size(self, step: int) -> tuple[int, int]:
        """Height and width in pixels of the images of an optimiser step, counted from 0 over the whole run."""
        if step == 0 or self.smallest == self.largest:
            side = self.largest
        else:
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=(step,))))
            side = int(generator.integers(self.smallest, self.largest + 1))
        return side * self.stride, side * self.stride


class TrainBatchSampler(Sampler[list[Request]]):
    """The micro-batches of one rank, epoch by epoch.

    ``batch_size`` is the number of images in one optimiser step over all ranks, ``device_batch_size`` that in one
    forward pass of one rank. An epoch has whole steps only: the images that are left over have another place in the
    order of the next epoch.
    """

    def __init__(
        self,
        num_images: int,
        batch_size: int,
        device_batch_size: int,
        world_size: int,
        rank: int,
        seed: int,
        sizes: MultiScale,
    ) -> None:
        micro_batch = device_batch_size * world_size
        if batch_size % micro_batch:
            lower = batch_size // micro_batch * micro_batch
            nearest = f"{lower} or {lower + micro_batch}" if lower else f"{micro_batch}"
            hint = ""
            if batch_size % world_size == 0:
                fitting = fitting_device_batch_size(batch_size, world_size, device_batch_size)
                hint = f", or train.device_batch_size={fitting}"
            raise DataError(
                f"train.batch_size={batch_size} is not a multiple of {world_size} processes x "
                f"train.device_batch_size={device_batch_size}. fix: train.batch_size={nearest}{hint}"
            )
        if num_images < batch_size:
            raise DataError(
                f"the training set has {num_images} images, fewer than train.batch_size={batch_size}. "
                f"fix: a train.batch_size of at most {num_images}"
            )
        self.device_batch_size = device_batch_size
        self.accumulate = batch_size // micro_batch  # micro-batches in one step
        self.steps_per_epoch = num_images // batch_size
        self.sizes = sizes
        self.epoch = 0
        self.start_micro_batch = 0
        # Torch shuffles by seed + epoch; spread the seeds, or run 1 would begin with the second epoch of run 0.
        spread = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> np.uint64(1))
        self._order: DistributedSampler[int] = DistributedSampler(
            range(num_images),  # type: ignore[arg-type]  # it only asks for the length
            num_replicas=world_size,
            rank=rank,
            shuffle=True,
            seed=spread,
            drop_last=True,
        )

    def set_epoch(self, epoch: int, start_micro_batch: int = 0) -> None:
        """Chooses the epoch to iterate over next, and how many of its micro-batches a resumed run has already had."""
        self.epoch = epoch
        self.start_micro_batch = start_micro_batch
        self._order.set_epoch(epoch)

    def __len__(self) -> int:
        return self.steps_per_epoch * self.accumulate - self.start_micro_batch

    def __iter__(self) -> Iterator[list[Request]]:
        epoch = self.epoch
        batches = BatchSampler(self._order, self.device_batch_size, drop_last=True)
        whole_steps = enumerate(islice(batches, self.steps_per_epoch * self.accumulate))
        for number, indices in islice(whole_steps, self.start_micro_batch, None):
            step = epoch * self.steps_per_epoch + number // self.accumulate
            height, width = self.sizes.size(step)
            yield [Request(index, height, width, epoch) for index in indices]


class EvalBatchSampler(Sampler[list[Request]]):
    """Every ``world_size``-th of the batches from ``eval_batches``: each image exactly once over all ranks."""

    def __init__(self, batches: list[list[Request]], rank: int, world_size: int) -> None:
        self.batches = batches[rank::world_size]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Request]]:
        return iter(self.batches)


def eval_batches(
    sizes: NDArray[np.int32],
    image_size: int,
    batch_size: int,
    stride: int,
    rect: bool,
    upscale: bool = False,
    pad: float = 0.0,
) -> list[list[Request]]:
    """All images in batches of at most ``batch_size`` with one shape each, the largest shape first.

    ``sizes`` (N, 2) are heights and widths; images are scaled so that their longer side is at most ``image_size``.
    Without ``rect`` the shape is the square of ``image_size``, rounded up to a multiple of ``stride``. With it, it is
    the image's own: its scaled sides, plus ``pad`` strides, rounded up. Since only images of equal shape share a batch,
    an image's input depends neither on ``batch_size`` nor on its neighbours.
    """

    def rounded_up(side: float) -> int:
        return int(np.ceil(side / stride)) * stride

    def shape(index: int) -> tuple[int, int]:
        if not rect:
            return rounded_up(image_size), rounded_up(image_size)
        height, width = scaled_size(tuple(sizes[index].tolist()), (image_size, image_size), upscale)
        return rounded_up(height + pad * stride), rounded_up(width + pad * stride)

    shapes = [shape(index) for index in range(len(sizes))]
    order = sorted(range(len(sizes)), key=lambda i: (-shapes[i][0] * shapes[i][1], shapes[i], i))
    batches = []
    for (height, width), group in groupby(order, key=shapes.__getitem__):
        indices = list(group)
        for start in range(0, len(indices), batch_size):
            batches.append([Request(index, height, width, 0) for index in indices[start : start + batch_size]])
    return batches


def fitting_device_batch_size(batch_size: int, world_size: int, largest: int) -> int:
    """The most images, but not above ``largest``, for one forward pass of one rank that ``batch_size`` divides into.

    Raises ``DataError`` where the ranks cannot share ``batch_size`` evenly.
    """
    per_rank, rest = divmod(batch_size, world_size)
    if rest or not per_rank:
        nearest = f"{per_rank * world_size} or " if per_rank else ""
        raise DataError(
            f"train.batch_size={batch_size} is not a multiple of {world_size} processes. "
            f"fix: train.batch_size={nearest}{(per_rank + 1) * world_size}"
        )
    return max(size for size in range(1, min(per_rank, largest) + 1) if per_rank % size == 0)
