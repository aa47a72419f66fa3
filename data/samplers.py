"""Choose when each image comes, at which size and on which rank.

An epoch has one order for the whole run, and each rank takes its share. So a micro-batch, one
forward pass over all ranks, holds the same images at any number of ranks if its total size is the
same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby, islice

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from data.config import Resize
from data.errors import DataError
from data.geometry import scaled_size
from data.orders import EpochOrder, Order, Shapes, grouped_by_shape, largest_rectangle
from data.plan import Request


class MultiScale:
    """The image size of each optimiser step: a random multiple of ``stride`` in a range.

    The size depends on (seed, step) alone, so all ranks and a resumed run agree. Step 0 has the
    largest size, so memory runs out at once or never. ``low`` and ``high`` are factors on
    ``image_size``; 1 and 1 fix the size.
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
        """Return height and width in pixels for an optimiser step, counted from 0 over the run."""
        if step == 0 or self.smallest == self.largest:
            side = self.largest
        else:
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=(step,))))
            side = int(generator.integers(self.smallest, self.largest + 1))
        return side * self.stride, side * self.stride

    def rectangle(self, image_size: int, height: float, width: float) -> tuple[int, int]:
        """Turn shares of the image size into height, width in pixels, multiples of the stride."""
        rows, columns = (math.ceil(share * image_size / self.stride - 1e-6) for share in (height, width))
        return rows * self.stride, columns * self.stride

    def most_pixels(self, height: float, width: float) -> int:
        """Return the area in pixels of such a rectangle at the largest image size."""
        rows, columns = self.rectangle(self.largest * self.stride, height, width)
        return rows * columns


class TrainBatchSampler(Sampler[list[Request]]):
    """The micro-batches of one rank, epoch by epoch.

    ``batch_size`` counts the images in one optimiser step, ``micro_batch_size`` those in one
    forward pass, both over all ranks; None is the whole batch. An epoch has whole steps only; the
    next epoch shuffles the images left over to other places. Options:

    - ``factors`` (N,): how often each image comes in an epoch, see ``repeat_factors``;
    - ``image_sizes`` (N, 2), heights and widths: images of a step share a rectangle of their
      aspect;
    - ``tile_pool``: blocks of this many consecutive positions are the pools of their requests. They
      follow from the order of the whole run, so no sample depends on the number of ranks. If a
      rank's share of a micro-batch is a multiple, each block goes to one rank, and a batch decodes
      only its own images.

    Raises DataError, with sizes that fit, if the ranks cannot share the micro-batches evenly or the
    images fill no batch.
    """

    def __init__(
        self,
        num_images: int,
        batch_size: int,
        micro_batch_size: int | None,
        world_size: int,
        rank: int,
        seed: int,
        sizes: MultiScale,
        *,
        factors: NDArray[np.float64] | None = None,
        image_sizes: NDArray[np.int32] | None = None,
        tile_pool: int = 0,
    ) -> None:
        micro_batch_size = batch_size if micro_batch_size is None else micro_batch_size
        _check_batch_sizes(batch_size, micro_batch_size, world_size)
        if num_images < batch_size:
            raise DataError(
                f"the training set has {num_images} images, fewer than train.batch_size={batch_size}. "
                f"fix: a train.batch_size of at most {num_images}"
            )
        self.images_per_rank = micro_batch_size // world_size  # in a micro-batch
        self.accumulate = batch_size // micro_batch_size  # micro-batches in one step
        self.sizes = sizes
        self.epoch = 0
        self.start_micro_batch = 0
        self._order = Order(num_images, seed, factors)
        self.steps_per_epoch = self._order.length // batch_size
        self._batch_size = batch_size
        self._seed = seed
        self._image_sizes = image_sizes
        self._tile_pool = tile_pool
        self._unit = math.gcd(tile_pool, self.images_per_rank) if tile_pool else 1  # positions dealt together
        self._dealt: DistributedSampler[int] = DistributedSampler(
            range(self.steps_per_epoch * batch_size // self._unit),  # type: ignore[arg-type]  # only its length counts
            num_replicas=world_size,
            rank=rank,
            shuffle=False,
            drop_last=True,
        )

    def set_epoch(self, epoch: int, start_micro_batch: int = 0) -> None:
        """Choose the next epoch and its first micro-batch, which a resumed run continues from."""
        self.epoch = epoch
        self.start_micro_batch = start_micro_batch

    def __len__(self) -> int:
        return self.steps_per_epoch * self.accumulate - self.start_micro_batch

    def __iter__(self) -> Iterator[list[Request]]:
        epoch = self.epoch
        order, shapes = self._of_epoch(epoch)
        batches = BatchSampler(self._dealt, self.images_per_rank // self._unit, drop_last=True)
        for number, units in islice(enumerate(batches), self.start_micro_batch, None):
            step = number // self.accumulate
            height, width = self.sizes.size(epoch * self.steps_per_epoch + step)
            if shapes is not None:
                height, width = self.sizes.rectangle(height, shapes.heights[step], shapes.widths[step])
            positions = np.concatenate([np.arange(unit * self._unit, (unit + 1) * self._unit) for unit in units])
            pools = self._pools(positions, order)
            yield [
                Request(index, height, width, epoch, repeat, pool)
                for index, repeat, pool in zip(
                    order.indices[positions].tolist(), order.repeats[positions].tolist(), pools, strict=True
                )
            ]

    def _of_epoch(self, epoch: int) -> tuple[EpochOrder, Shapes | None]:
        order = self._order.of_epoch(epoch)
        if self._image_sizes is None:
            return order, None
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(self._seed, spawn_key=(epoch, 1))))
        largest = None
        if epoch == 0:  # so memory runs out in the first step or never
            extra = 0 if self._order.factors is None else 1  # some epochs draw one more
            left_out = self._order.length - self.steps_per_epoch * self._batch_size + extra
            largest = largest_rectangle(self._image_sizes, self._batch_size, left_out, self.sizes.most_pixels)
        return grouped_by_shape(order, self._image_sizes, self._batch_size, generator, largest)

    def _pools(self, positions: NDArray[np.int64], order: EpochOrder) -> list[tuple[int, ...]]:
        """Return the block of each position; the last block reaches back to have full length."""
        if not self._tile_pool:
            return [()] * len(positions)
        last = max(0, len(order.indices) - self._tile_pool)
        starts = np.minimum(positions // self._tile_pool * self._tile_pool, last).tolist()
        blocks = {start: tuple(order.indices[start : start + self._tile_pool].tolist()) for start in set(starts)}
        return [blocks[start] for start in starts]


def _check_batch_sizes(batch_size: int, micro_batch_size: int, world_size: int) -> None:
    if batch_size % world_size:
        lower = batch_size // world_size * world_size
        sizes = f"{lower} or {lower + world_size}" if lower else f"{world_size}"
        raise DataError(
            f"train.batch_size={batch_size} is not a multiple of {world_size} ranks. fix: train.batch_size={sizes}"
        )
    if batch_size % micro_batch_size or micro_batch_size % world_size:
        fitting = (size for size in range(world_size, batch_size + 1, world_size) if batch_size % size == 0)
        nearest = min(fitting, key=lambda size: abs(size - micro_batch_size))
        raise DataError(
            f"train.micro_batch_size={micro_batch_size} must divide train.batch_size={batch_size} and be a multiple of "
            f"{world_size} ranks. fix: train.micro_batch_size={nearest}"
        )


def input_shape(
    size: tuple[int, int],
    image_size: int,
    stride: int,
    rect: bool,
    resize: Resize = Resize.letterbox,
) -> tuple[int, int]:
    """Return height and width of the network input for an image of ``size`` (height, width).

    This is the square of ``image_size``, rounded up to a multiple of ``stride``. With ``rect`` it
    is the image's own rectangle, scaled so that its longer side is ``image_size``, rounded up. A
    stretched image always has square input.
    """
    if rect and resize == Resize.letterbox:
        sides = scaled_size(size, (image_size, image_size))
    else:
        sides = (image_size, image_size)
    height, width = (-(-side // stride) * stride for side in sides)
    return height, width


def eval_batches(
    sizes: NDArray[np.int32],
    image_size: int,
    batch_size: int,
    stride: int,
    rect: bool,
    resize: Resize = Resize.letterbox,
) -> list[list[Request]]:
    """Group all images into batches of one shape, at most ``batch_size`` each, largest first.

    ``sizes`` (N, 2) are heights and widths; see ``input_shape`` for the rest. As only images of
    equal shape share a batch, an image's input depends neither on ``batch_size`` nor on its
    neighbours. Rank r of n takes every n-th batch, from number r on.
    """
    shapes = [input_shape((height, width), image_size, stride, rect, resize) for height, width in sizes.tolist()]
    order = sorted(range(len(sizes)), key=lambda i: (-shapes[i][0] * shapes[i][1], shapes[i], i))
    batches = []
    for (height, width), group in groupby(order, key=shapes.__getitem__):
        indices = list(group)
        for start in range(0, len(indices), batch_size):
            batches.append([Request(index, height, width, 0) for index in indices[start : start + batch_size]])
    return batches
