"""Choose when each image comes, at which size and on which rank.

An epoch has one order, by (seed, epoch) alone, and each rank takes its share of each micro-batch.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from data.config import Resize, must_fit
from data.errors import DataError
from data.geometry import ImageSize, Size, both_sides, scaled_size
from data.index import Annotations, check_fills_batch
from data.plan import MOST_OTHERS, Request

logger = logging.getLogger(__name__)

Numbers = NDArray[np.int64]
Shares = NDArray[np.float64]  # (n, 2) height, width as shares of the longer side
Sizes = NDArray[np.int32]  # (N, 2) height, width in pixels
TABLE_IMAGES = 1_000_000  # a set of more has an order that is computed, not listed
LISTED_ORDER = 10_000_000  # images that rect and repeat factors sort within seconds
ROUNDS = 8  # of the Feistel network
DECIMALS = 6  # of a sum of factors: more would depend on the order of the terms
GOLDEN = 0x9E3779B97F4A7C15  # the step between the numbers that SplitMix64 mixes


class MultiScale:
    """The image size of each optimiser step: a random multiple of ``stride`` in a range.

    ``low`` and ``high`` are factors on ``image_size``, a side or [height, width]. A size is that of
    the longer side, of which ``shares`` are height and width; it depends only on (seed, step). Step
    0 has the largest, so that memory runs out at once or never.
    """

    def __init__(self, image_size: ImageSize, low: float, high: float, stride: int, seed: int) -> None:
        height, width = both_sides(image_size)
        rows, columns = _rounded_up(height, stride), _rounded_up(width, stride)
        if (rows, columns) != (height, width):
            fitting = rows if rows == columns else f"[{rows},{columns}]"
            unit = f"the network's stride {stride}"
            raise DataError(f"train.image_size={image_size} is not a multiple of {unit}", f"train.image_size={fitting}")
        self.stride, self.seed = stride, seed
        longer = max(height, width)
        self.shares = height / longer, width / longer
        self.smallest = max(1, round(longer * low / stride))  # in strides
        largest = max(1, round(longer * high / stride))
        self.count = largest - self.smallest + 1  # of sizes
        self.largest_size = largest * stride  # in pixels

    def size(self, step: int) -> int:
        """Return the longer side in pixels for an optimiser step, counted from 0 over the run."""
        if step == 0:
            return self.largest_size
        generator = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(step,)))
        return int(self.smallest + generator.integers(self.count)) * self.stride

    def rectangle(self, image_size: int, height: float, width: float) -> Size:
        """Turn shares of the image size into height and width, multiples of the stride."""
        return _rounded_up(height * image_size, self.stride), _rounded_up(width * image_size, self.stride)


def _rounded_up(length: float, unit: int) -> int:
    """The next multiple of ``unit``; rounding errors do not count."""
    return math.ceil(length / unit - 1e-6) * unit


def permuted(positions: Numbers, count: int, key: Sequence[int]) -> Numbers:
    """The images at ``positions`` (P,) of a random order of ``count``, which no table holds.

    A Feistel network permutes the numbers of as many bits as ``count`` needs (Luby & Rackoff 1988);
    one that leads beyond ``count`` goes through it again (cycle walking, Black & Rogaway 2002).
    Each (count, key) is one permutation.
    """
    bits = (count - 1).bit_length()
    right_bits = max(1, bits // 2)
    left_mask, right_mask = 2 ** max(1, bits - right_bits) - 1, 2**right_bits - 1
    keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)
    values = positions.astype(np.uint64)
    outside = np.full(values.shape, True)
    while outside.any():
        left, right = values[outside] >> right_bits, values[outside] & right_mask
        for left_key, right_key in keys.reshape(-1, 2):
            left ^= _mixed(right + left_key) & left_mask
            right ^= _mixed(left + right_key) & right_mask
        values[outside] = (left << right_bits) | right
        outside = values >= count
    return values.astype(np.int64)


def _mixed(values: np.ndarray) -> np.ndarray:
    """Each number hashed to 64 bits: the finaliser of SplitMix64 (Steele, Lea & Flood 2014)."""
    values = (values ^ (values >> 30)) * 0xBF58476D1CE4E5B9
    values = (values ^ (values >> 27)) * 0x94D049BB133111EB
    return np.asarray(values ^ (values >> 31))


class TrainSampler(torch.utils.data.DistributedSampler[int]):
    """The share of one rank in the order that an epoch has over all ranks.

    Yields positions, whose images ``images_at`` tells. ``batch_size`` counts the images in one
    optimiser step, ``micro_batch_size`` (None: all) those in one forward pass, both over all ranks.
    An epoch has whole steps only; the next one leaves out other images.

    - ``factors`` (N,): how often each image comes in an epoch, see ``repeat_factors``;
    - ``image_sizes`` (N, 2), heights and widths: a step is a rectangle of images of one aspect;
    - ``tile_pool``: blocks of this many consecutive positions go to one rank, so that a batch
      decodes only its own images, if a rank's share of a micro-batch is a multiple.

    Raises DataError, with a size that fits, for uneven shares and for fewer images than a batch.
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
        image_sizes: Sizes | None = None,
        tile_pool: int = 0,
    ) -> None:
        micro_batch_size = batch_size if micro_batch_size is None else micro_batch_size
        must_fit(batch_size, micro_batch_size, num_replicas)
        check_fills_batch(num_images, batch_size, num_replicas)
        images = range(num_images)  # torch uses only its length
        super().__init__(images, num_replicas, rank, seed=seed, drop_last=True)  # type: ignore[arg-type]
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.sizes, self.tile_pool = sizes, tile_pool
        # Units of so many consecutive positions are dealt to the ranks in turn.
        self.unit = math.gcd(tile_pool, micro_batch_size // num_replicas) if tile_pool else 1
        self._factors, self._image_sizes = factors, image_sizes
        self._num_images = num_images
        is_sorted = factors is not None or image_sizes is not None
        self._is_listed = is_sorted or num_images <= TABLE_IMAGES
        if is_sorted and num_images > LISTED_ORDER:
            about = f"train.rect and train.repeat_threshold sort {num_images:,} images at the start of each epoch"
            logger.warning("%s, in seconds and gigabytes on each rank. fix: leave them out", about)
        length = num_images if factors is None else int(factors.sum().round(DECIMALS))
        self.steps_per_epoch, self._left_out = divmod(length, batch_size)
        self.total_size = self.steps_per_epoch * batch_size  # of all ranks, as torch calls it
        self.num_samples = self.total_size // num_replicas  # of this one
        # Positions that the epoch's order has; ``total_size`` of these are used.
        self.order_length = length if image_sizes is None else self.total_size
        self.set_epoch(0)

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        """Choose the next epoch and its first step, at which a resumed run continues."""
        self.epoch, self.start_step = epoch, start_step
        self._order = self._shuffled() if self._is_listed else None
        # Height and width of each step (S, 2), as shares of its image size.
        self.rectangles: Shares = np.broadcast_to(self.sizes.shares, (self.steps_per_epoch, 2))
        if self._order is not None and self._image_sizes is not None:
            self._order, self.rectangles = self._grouped_by_shape(self._order, self._image_sizes)

    def images_at(self, positions: Numbers) -> Numbers:
        """The images at these positions, and how often each came before in the epoch: (2, ...)."""
        if self._order is not None:
            return self._order[:, positions]
        images = permuted(positions, self._num_images, (self.seed, self.epoch))
        return np.stack([images, np.zeros_like(images)])

    def __len__(self) -> int:
        return self.num_samples - self.start_step * self.batch_size // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        first = self.start_step * self.batch_size + self.rank * self.unit
        for start in range(first, self.total_size, self.unit * self.num_replicas):
            yield from range(start, start + self.unit)

    def _shuffled(self) -> Numbers:
        """The image at each position of the epoch, and how often it came before: (2, P).

        Fractional factors are rounded at random, jointly for all images, so every epoch is as long.
        """
        # Spread the seeds, or seed 1 would begin with the second epoch of seed 0.
        seed = int(np.random.SeedSequence(self.seed).generate_state(1, np.uint64)[0]) >> 1
        shuffler = torch.Generator().manual_seed(seed + self.epoch)
        images = torch.randperm(self._num_images, generator=shuffler).numpy()
        if self._factors is None:
            return np.stack([images, np.zeros_like(images)])[:, : self.order_length]
        # Systematic sampling: round the cumulative factors with one common random fraction.
        generator = np.random.default_rng([seed, self.epoch])
        sums = np.cumsum(self._factors[images]).round(DECIMALS)
        ends = np.floor(sums + generator.random()).astype(np.int64)
        counts = np.diff(ends, prepend=0)
        indices = np.repeat(images, counts)
        repeats = np.arange(len(indices)) - np.repeat(ends - counts, counts)
        kept = generator.permutation(len(indices))[: self.order_length]
        return np.stack([indices, repeats])[:, kept]

    def _grouped_by_shape(self, order: Numbers, image_sizes: Sizes) -> tuple[Numbers, Shares]:
        """Group images of similar aspect into steps; return the order and their rectangles (S, 2).

        In the first epoch, the step that best fills the largest rectangle of any epoch comes first
        and is padded to it, so that memory runs out in the first step or never.
        """
        generator = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(self.epoch, 1)))
        sides, aspect = _shares(image_sizes[order[0]])
        by_aspect = np.argsort(aspect, kind="stable").reshape(-1, self.batch_size)
        steps = generator.permutation(by_aspect)
        rectangles = sides[steps].max(axis=1)
        if self.epoch == 0:
            padded = np.maximum(rectangles, self._largest_rectangle(image_sizes))
            fullest = np.lexsort((-rectangles.prod(axis=1), padded.prod(axis=1)))[0]
            rectangles[fullest] = padded[fullest]
            for rows in (rectangles, steps):
                rows[[0, fullest]] = rows[[fullest, 0]]
        return order[:, steps.ravel()], rectangles

    def _largest_rectangle(self, image_sizes: Sizes) -> Shares:
        """Height and width (2,), as shares of the image size, of the largest step of any epoch."""
        sides, aspect = _shares(image_sizes)
        _, counts = np.unique(aspect, return_counts=True)
        ends = np.cumsum(counts)
        of_aspect = np.maximum.reduceat(sides[np.argsort(aspect)], ends - counts)
        # Each epoch leaves out other positions, which changes the images that share a step. With
        # factors, some epochs draw one position more.
        left_out = self._left_out + (self._factors is not None)
        # A step may span several aspects: one image each of the first and the last, and all between
        # but those left out.
        between = self.batch_size - 2 + left_out if self.batch_size > 1 else -1
        stops = np.searchsorted(ends, ends + between, side="right") + 1
        rectangles: list[Shares] = [of_aspect[first:stop].max(axis=0) for first, stop in enumerate(stops)]
        largest = self.sizes.largest_size
        areas = [math.prod(self.sizes.rectangle(largest, *shares)) for shares in rectangles]
        return rectangles[int(np.argmax(areas))]


class TrainBatchSampler(torch.utils.data.BatchSampler):
    """The micro-batches of one rank, ``accumulate`` in a step, all of one size.

    The pool of a request, from which mosaic and mixup take other images, is at random positions of
    the epoch's order or, with ``sampler.tile_pool``, the request's block of that many positions.
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
        length = min(order.tile_pool, order.order_length)
        seeds = np.random.SeedSequence(order.seed, spawn_key=(order.epoch, 2))
        for batch in super().__iter__():
            positions = np.array(batch)
            if order.tile_pool:  # the last block reaches back to be full
                starts = np.minimum(positions // length * length, order.order_length - length)
                others = starts[:, None] + np.arange(length)
            else:
                numbers = positions[:, None] * MOST_OTHERS + np.arange(MOST_OTHERS)
                random = _mixed(seeds.generate_state(1, np.uint64) + numbers.astype(np.uint64) * GOLDEN)
                others = (random % order.order_length).astype(np.int64)
            step = batch[0] // order.batch_size
            size = self.sizes.size(order.epoch * order.steps_per_epoch + step)
            height, width = self.sizes.rectangle(size, *order.rectangles[step])
            images, repeats = order.images_at(positions).tolist()
            pools = order.images_at(others)[0].tolist()
            yield [
                Request(index, height, width, order.epoch, repeat, tuple(pool))
                for index, repeat, pool in zip(images, repeats, pools, strict=True)
            ]


def repeat_factors(annotations: Annotations, threshold: float) -> NDArray[np.float64]:
    """How often each image (N,) comes in an epoch: 1, or more with a rare class.

    Repeat factor sampling of LVIS (Gupta, Dollar, Girshick 2019, appendix B.2): a class in a share
    f of the images has the factor max(1, sqrt(threshold / f)), an image the largest of its classes.
    """
    num_images, num_classes = len(annotations), len(annotations.names)
    images = np.repeat(np.arange(num_images), np.diff(annotations.offsets))
    pairs = images * num_classes + annotations.classes
    images, classes = np.divmod(np.unique(pairs[~annotations.crowd]), num_classes)  # each once
    counts = np.bincount(classes, minlength=num_classes)
    of_class = np.sqrt(threshold / (np.maximum(counts, 1) / num_images))
    factors = np.ones(num_images)
    np.maximum.at(factors, images, of_class[classes])
    return factors


def _shares(sizes: Sizes) -> tuple[Shares, Shares]:
    """Return sides as shares of the longer one, and the aspect in steps of 1/32, wide to tall."""
    sides = sizes / sizes.max(axis=1, keepdims=True)
    return sides, np.round((sides[:, 0] - sides[:, 1]) * 32)


def input_shape(size: Size, image_size: ImageSize, stride: int, rect: bool, resize: Resize) -> Size:
    """Height and width of the network input for an image of ``size`` (height, width).

    This is ``image_size`` or, with ``rect`` and a letterbox, the image's own rectangle in it,
    rounded up to multiples of ``stride``.
    """
    height, width = both_sides(image_size)
    if rect and resize == Resize.letterbox:
        height, width = scaled_size(size, (height, width))
    return _rounded_up(height, stride), _rounded_up(width, stride)


def eval_batches(
    sizes: Sizes, image_size: ImageSize, batch_size: int, *, stride: int, rect: bool, resize: Resize
) -> list[list[Request]]:
    """Group all images into batches of one shape, at most ``batch_size`` each, largest first.

    ``sizes`` (N, 2) are heights and widths; see ``input_shape`` for the rest. An image's input
    depends neither on ``batch_size`` nor on its neighbours.
    """
    by_shape = defaultdict[tuple[int, int, int], list[Request]](list)
    for index, size in enumerate(map(tuple, sizes.tolist())):
        height, width = input_shape(size, image_size, stride, rect, resize)
        by_shape[-height * width, height, width].append(Request(index, height, width, epoch=0))
    batches = []
    for _, requests in sorted(by_shape.items()):
        for start in range(0, len(requests), batch_size):
            batches.append(requests[start : start + batch_size])
    return batches
