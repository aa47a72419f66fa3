"""Choose when each image comes, at which size and on which rank.

An epoch has one order for all ranks, which depends only on (seed, epoch), and each rank takes its
share. So a micro-batch, one forward pass over all ranks, has the same images at any number of ranks
if its total size is the same.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from data.config import Resize
from data.errors import DataError
from data.geometry import both_sides, scaled_size
from data.index import Annotations
from data.plan import MOST_OTHERS, Request

logger = logging.getLogger(__name__)

TABLE_IMAGES = 1_000_000  # a set of more has an order that is computed, not listed
LISTED_ORDER = 10_000_000  # images that rect and repeat factors sort within seconds
ROUNDS = 8  # of the Feistel network
DECIMALS = 6  # of a sum of factors: more would depend on the order of the terms


class MultiScale:
    """The image size of each optimiser step: a random multiple of ``stride`` in a range.

    ``low`` and ``high`` are factors on ``image_size``, a side or [height, width]; 1 and 1 fix it.
    A size is that of the longer side, of which ``shares`` are height and width. It depends only on
    (seed, step), so all ranks and a resumed run agree. Step 0 has the largest, so that memory runs
    out at once or never.
    """

    def __init__(self, image_size: int | Sequence[int], low: float, high: float, stride: int, seed: int) -> None:
        sides = both_sides(image_size)
        if any(side % stride for side in sides):
            rows, columns = (math.ceil(side / stride) * stride for side in sides)
            raise DataError(
                f"train.image_size={image_size} is not a multiple of the network's stride {stride}. "
                f"fix: train.image_size={rows if rows == columns else f'[{rows},{columns}]'}"
            )
        self.stride, self.seed = stride, seed
        image_size = max(sides)
        self.shares = sides[0] / image_size, sides[1] / image_size
        self.smallest = max(1, round(image_size * low / stride))  # in strides
        self.largest = max(1, round(image_size * high / stride))
        self.count = self.largest - self.smallest + 1  # of sizes
        self.largest_size = self.largest * stride  # in pixels

    def size(self, step: int) -> int:
        """Return the longer side in pixels for an optimiser step, counted from 0 over the run."""
        if step == 0 or self.smallest == self.largest:
            return self.largest_size
        generator = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(step,)))
        return int(generator.integers(self.smallest, self.largest + 1)) * self.stride

    def rectangle(self, image_size: int, height: float, width: float) -> tuple[int, int]:
        """Turn shares of the image size into height and width, multiples of the stride."""
        rows, columns = (math.ceil(share * image_size / self.stride - 1e-6) for share in (height, width))
        return rows * self.stride, columns * self.stride


def permuted(positions: NDArray[np.int64], count: int, key: Sequence[int]) -> NDArray[np.int64]:
    """The images at ``positions`` (P,) of a random order of ``count``, which no table holds.

    A Feistel network of ROUNDS keyed rounds permutes the numbers of as many bits as ``count`` needs
    (Luby & Rackoff 1988); one that leads beyond ``count`` goes through it again until it does not
    (cycle walking, Black & Rogaway 2002). Each (count, key) is one permutation. Time and memory
    depend on the positions alone.
    """
    right_bits = np.uint64(max(1, (count - 1).bit_length() // 2))
    left_bits = np.uint64(max(1, (count - 1).bit_length() - int(right_bits)))
    keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)
    values, outside = positions.astype(np.uint64), np.full(positions.shape, True)
    while outside.any():
        left, right = values[outside] >> right_bits, values[outside] & ((_ONE << right_bits) - _ONE)
        for number, round_key in enumerate(keys):
            if number % 2:
                right ^= _mixed(left + round_key) & ((_ONE << right_bits) - _ONE)
            else:
                left ^= _mixed(right + round_key) & ((_ONE << left_bits) - _ONE)
        values[outside] = (left << right_bits) | right
        outside = values >= count
    return values.astype(np.int64)


_ONE = np.uint64(1)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # the step between the numbers that SplitMix64 mixes


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each number hashed to 64 bits: the finaliser of SplitMix64 (Steele, Lea & Flood 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    return values ^ (values >> np.uint64(31))


class TrainSampler(torch.utils.data.DistributedSampler[int]):
    """The share of one rank in the order that an epoch has over all ranks.

    Yields positions of the order, whose images ``images_at`` tells. Sets above TABLE_IMAGES have an
    order that is computed for each batch, so that epochs start and resume at once. ``batch_size``
    counts the images in one optimiser step, ``micro_batch_size`` (None: all) those in one forward
    pass, both over all ranks. An epoch has whole steps only; the next one leaves out other images.
    Options:

    - ``factors`` (N,): how often each image comes in an epoch, see ``repeat_factors``;
    - ``image_sizes`` (N, 2), heights and widths: a step is a rectangle of images of one aspect;
    - ``tile_pool``: blocks of this many consecutive positions go to one rank, so that a batch
      decodes only its own images, if a rank's share of a micro-batch is a multiple.

    Raises DataError, with a size that fits, if the ranks cannot share the micro-batches evenly or
    the images do not fill a batch.
    """

    def __init__(
        self,
        num_images: int,
        sizes: MultiScale,
        *,
        batch_size: int,
        micro_batch_size: int | None = None,
        num_replicas: int,
        rank: int,
        seed: int,
        factors: NDArray[np.float64] | None = None,
        image_sizes: NDArray[np.int32] | None = None,
        tile_pool: int = 0,
    ) -> None:
        micro_batch_size = batch_size if micro_batch_size is None else micro_batch_size
        check_batch_sizes(num_images, batch_size, micro_batch_size, num_replicas)
        images = cast("torch.utils.data.Dataset[int]", range(num_images))  # torch uses only its length
        super().__init__(images, num_replicas, rank, seed=seed, drop_last=True)
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.sizes, self.tile_pool = sizes, tile_pool
        # Units of so many consecutive positions are dealt to the ranks in turn.
        self.unit = math.gcd(tile_pool, micro_batch_size // num_replicas) if tile_pool else 1
        self._factors, self._image_sizes = factors, image_sizes
        self._num_images = num_images
        if num_images > LISTED_ORDER and (factors is not None or image_sizes is not None):
            about = f"train.rect and train.repeat_threshold sort {num_images:,} images at the start of each epoch"
            logger.warning("%s, in seconds and gigabytes on each rank. fix: leave them out", about)
        self._length = num_images if factors is None else int(factors.sum().round(DECIMALS))
        self.steps_per_epoch = self._length // batch_size
        self.total_size = self.steps_per_epoch * batch_size  # of all ranks, as torch calls it
        self.num_samples = self.total_size // num_replicas  # of this one
        self.set_epoch(0)

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        """Choose the next epoch and its first step, at which a resumed run continues."""
        self.epoch, self.start_step = epoch, start_step
        self._order = self._rectangles = None
        if self._factors is not None or self._image_sizes is not None or self._num_images <= TABLE_IMAGES:
            self._order = self._shuffled(epoch)
        if self._order is not None and self._image_sizes is not None:
            self._order, self._rectangles = self._grouped_by_shape(self._order, self._image_sizes, epoch)

    @property
    def order_length(self) -> int:
        """The number of positions that the epoch's order has; ``total_size`` of these are used."""
        return self._num_images if self._order is None else self._order.shape[1]

    def images_at(self, positions: Sequence[int] | NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The images at these positions, and how often each came before in the epoch."""
        at = np.asarray(positions, dtype=np.int64)
        if self._order is not None:
            return self._order[0, at], self._order[1, at]
        return permuted(at, self._num_images, (self.seed, self.epoch)), np.zeros_like(at)

    def shares_of(self, step: int) -> tuple[float, float]:
        """Height and width of a step of the epoch, as shares of its image size."""
        return self.sizes.shares if self._rectangles is None else tuple(self._rectangles[step])

    def __len__(self) -> int:
        return self.num_samples - self.start_step * self.batch_size // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        first = self.start_step * self.batch_size + self.rank * self.unit
        for start in range(first, self.total_size, self.unit * self.num_replicas):
            yield from range(start, start + self.unit)

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        """The image at each position of an epoch, and how often it came before: (2, P).

        Fractional factors are rounded at random, jointly for all images, so every epoch is as long
        as the sum of the factors, rounded down.
        """
        # Spread the seeds, or seed 1 would begin with the second epoch of seed 0.
        seed = int(np.random.SeedSequence(self.seed).generate_state(1, np.uint64)[0] >> np.uint64(1))
        images = torch.randperm(self._num_images, generator=torch.Generator().manual_seed(seed + epoch)).numpy()
        if self._factors is None:
            return np.stack([images, np.zeros_like(images)])
        # Systematic sampling: round the cumulative factors with one common random fraction.
        generator = np.random.default_rng([seed, epoch])
        ends = np.floor(np.cumsum(self._factors[images]).round(DECIMALS) + generator.random()).astype(np.int64)
        counts = np.diff(ends, prepend=0)
        indices = np.repeat(images, counts)
        repeats = np.arange(len(indices)) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.stack([indices, repeats])[:, generator.permutation(len(indices))[: self._length]]

    def _grouped_by_shape(
        self, order: NDArray[np.int64], image_sizes: NDArray[np.int32], epoch: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Group images of similar aspect into steps, and shuffle the steps.

        Returns the order and the rectangles (S, 2) of the steps. Images of equal aspect keep their
        order. In the first epoch, the step that best fills the largest rectangle of any epoch comes
        first and is padded to it, so that memory runs out in the first step or never.
        """
        steps = self.steps_per_epoch
        generator = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(epoch, 1)))
        sides, aspect = _shares(image_sizes[order[0, : steps * self.batch_size]])
        positions = np.argsort(aspect, kind="stable").reshape(steps, self.batch_size)
        rectangles = sides[positions].max(axis=1)
        numbers = generator.permutation(steps)
        if epoch == 0:
            padded = np.maximum(rectangles[numbers], self._largest_rectangle(image_sizes))
            fullest = int(np.lexsort((-rectangles[numbers].prod(axis=1), padded.prod(axis=1)))[0])
            rectangles[numbers[fullest]] = padded[fullest]
            numbers[[0, fullest]] = numbers[[fullest, 0]]
        return order[:, positions[numbers].ravel()], rectangles[numbers]

    def _largest_rectangle(self, image_sizes: NDArray[np.int32]) -> tuple[float, ...]:
        """Height and width, as shares of the image size, of the largest step of any epoch."""
        sides, aspect = _shares(image_sizes)
        _, groups, counts = np.unique(aspect, return_inverse=True, return_counts=True)
        of_group = np.stack([sides[groups == group].max(axis=0) for group in range(len(counts))])
        # Each epoch leaves out other positions, which changes the images that share a step. With
        # factors, some epochs draw one position more.
        left_out = self._length % self.batch_size + (self._factors is not None)
        # A step may span several aspects: one image each of the first and the last, and all between
        # but those left out.
        between = self.batch_size - 2 + left_out if self.batch_size > 1 else -1
        rectangles = []
        for first in range(len(counts)):
            last = first
            while last + 1 < len(counts) and counts[first + 1 : last + 1].sum() <= between:
                last += 1
            rectangles.append(tuple(of_group[first : last + 1].max(axis=0).tolist()))
        return max(rectangles, key=lambda shares: math.prod(self.sizes.rectangle(self.sizes.largest_size, *shares)))


class TrainBatchSampler(torch.utils.data.BatchSampler):
    """The micro-batches of one rank, ``accumulate`` in a step, all of one size.

    The pool of a request, from which mosaic and mixup take other images, has images at random
    positions of the epoch's order, so they come as often there as their factors say. With
    ``sampler.tile_pool``, it is the request's block of that many consecutive positions. Both are
    the same on any number of ranks.
    """

    sampler: TrainSampler

    def __init__(self, sampler: TrainSampler) -> None:
        self.images_per_rank = sampler.micro_batch_size // sampler.num_replicas  # in a micro-batch
        self.accumulate = sampler.batch_size // sampler.micro_batch_size  # micro-batches in one step
        self.steps_per_epoch = sampler.steps_per_epoch
        self.sizes = sampler.sizes
        largest = self.sizes.rectangle(self.sizes.largest_size, *self.sizes.shares)
        self.batch_bytes = 3 * self.images_per_rank * math.prod(largest)  # of the largest, as uint8
        super().__init__(sampler, self.images_per_rank, drop_last=True)

    def __iter__(self) -> Iterator[list[Request]]:  # type: ignore[override]  # torch's class yields numbers
        order = self.sampler
        for positions in super().__iter__():
            step = positions[0] // order.batch_size
            size = self.sizes.size(order.epoch * order.steps_per_epoch + step)
            height, width = self.sizes.rectangle(size, *order.shares_of(step))
            images, repeats = order.images_at(positions)
            pools = order.images_at(self._positions_of_pools(np.array(positions)))[0].tolist()
            places = zip(images.tolist(), repeats.tolist(), map(tuple, pools), strict=True)
            yield [Request(index, height, width, order.epoch, repeat, pool) for index, repeat, pool in places]

    def _positions_of_pools(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The positions (P, n) in the order of the pools of ``positions`` (P,)."""
        order = self.sampler
        if order.tile_pool:  # the last block reaches back to be full
            length = min(order.tile_pool, order.order_length)
            starts = np.minimum(positions // length * length, order.order_length - length)
            return starts[:, None] + np.arange(length)
        key = np.random.SeedSequence(order.seed, spawn_key=(order.epoch, 2)).generate_state(1, np.uint64)
        numbers = positions[:, None] * MOST_OTHERS + np.arange(MOST_OTHERS)
        random = _mixed(key + numbers.astype(np.uint64) * _GOLDEN)
        return (random % np.uint64(order.order_length)).astype(np.int64)


def repeat_factors(annotations: Annotations, threshold: float) -> NDArray[np.float64]:
    """Return how often each image (N,) comes in an epoch: 1, or more with a rare class.

    Repeat factor sampling of LVIS (Gupta, Dollar, Girshick 2019, appendix B.2). A class in a share
    f of the images has the factor max(1, sqrt(threshold / f)), an image the largest factor of its
    classes. Crowds do not count.
    """
    num_images, num_classes = len(annotations), len(annotations.names)
    objects = ~np.asarray(annotations.crowd)
    images = np.repeat(np.arange(num_images), np.diff(annotations.offsets))[objects]
    classes = np.asarray(annotations.classes)[objects]
    pairs = np.unique(images * num_classes + classes)  # each class of each image once
    images, classes = pairs // num_classes, pairs % num_classes
    share = np.bincount(classes, minlength=num_classes) / num_images
    of_class = np.sqrt(np.divide(threshold, share, where=share > 0, out=np.ones(num_classes)))
    factors = np.ones(num_images)
    np.maximum.at(factors, images, of_class[classes])
    return factors


def _shares(sizes: NDArray[np.int32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return sides as shares of the longer one, and the aspect in steps of 1/32, wide to tall."""
    sides = sizes / sizes.max(axis=1, keepdims=True)
    return sides, np.round((sides[:, 0] - sides[:, 1]) * 32)


def check_batch_sizes(num_images: int, batch_size: int, micro_batch_size: int, world_size: int) -> None:
    """Raise DataError unless ``world_size`` ranks can share batches of so many images."""
    if batch_size % world_size:
        raise DataError(
            f"train.batch_size={batch_size} is not a multiple of {world_size} ranks. "
            f"fix: train.batch_size={math.ceil(batch_size / world_size) * world_size}"
        )
    if batch_size % micro_batch_size or micro_batch_size % world_size:
        fitting = (size for size in range(world_size, batch_size + 1, world_size) if batch_size % size == 0)
        nearest = min(fitting, key=lambda size: abs(size - micro_batch_size))
        raise DataError(
            f"train.micro_batch_size={micro_batch_size} must divide train.batch_size={batch_size} and be a multiple of "
            f"{world_size} ranks. fix: train.micro_batch_size={nearest}"
        )
    if num_images < batch_size:
        raise DataError(
            f"the training set has {num_images} images, fewer than train.batch_size={batch_size}. "
            f"fix: a train.batch_size of at most {num_images}"
        )


def input_shape(
    size: tuple[int, int], image_size: int | Sequence[int], stride: int, rect: bool, resize: Resize
) -> tuple[int, int]:
    """Return height and width of the network input for an image of ``size`` (height, width).

    This is ``image_size``, a square or (height, width). With ``rect`` and a letterbox it is the
    image's own rectangle in it. Both are rounded up to multiples of ``stride``.
    """
    sides = both_sides(image_size)
    if rect and resize == Resize.letterbox:
        sides = scaled_size(size, sides)
    return math.ceil(sides[0] / stride) * stride, math.ceil(sides[1] / stride) * stride


def eval_batches(
    sizes: NDArray[np.int32],
    image_size: int | Sequence[int],
    batch_size: int,
    *,
    stride: int,
    rect: bool,
    resize: Resize,
) -> list[list[Request]]:
    """Group all images into batches of one shape, at most ``batch_size`` each, largest first.

    ``sizes`` (N, 2) are heights and widths; see ``input_shape`` for the rest. Only images of equal
    shape share a batch, so an image's input depends neither on ``batch_size`` nor on its
    neighbours. Rank r of n takes every n-th batch, from number r on.
    """
    by_shape: dict[tuple[int, int], list[int]] = {}
    for index, (height, width) in enumerate(sizes.tolist()):
        by_shape.setdefault(input_shape((height, width), image_size, stride, rect, resize), []).append(index)
    batches = []
    for (height, width), indices in sorted(by_shape.items(), key=lambda item: (-math.prod(item[0]), item[0])):
        for start in range(0, len(indices), batch_size):
            batches.append([Request(index, height, width, 0) for index in indices[start : start + batch_size]])
    return batches
