"""Order the images of an epoch: shuffled, balanced by class, grouped by shape.

Each order depends on (seed, epoch) alone, not on the number of ranks. data/samplers.py
deals it to the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data.distributed import DistributedSampler

from data.index import Annotations

DIGITS = 6  # decimals of a sum of factors: more would depend on the order of the terms


class EpochOrder(NamedTuple):
    """P positions of an epoch."""

    indices: NDArray[np.int64]  # (P,) the image at each position
    repeats: NDArray[np.int64]  # (P,) how often the image has come before in this epoch


def repeat_factors(annotations: Annotations, threshold: float) -> NDArray[np.float64]:
    """Return how often each image (N,) comes in an epoch, at least 1; more for rare classes.

    Repeat factor sampling of LVIS (Gupta, Dollar, Girshick 2019, appendix B.2). A class in a share
    f of the images has the factor max(1, sqrt(threshold / f)). An image has the largest factor of
    its classes. Crowds do not count.
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


class Order:
    """The order of each epoch: all images shuffled, each repeated by its factor if given (N,).

    Each epoch rounds the fractional factors at random, jointly for all images. So an epoch is
    always as long as the sum of the factors, rounded down.
    """

    def __init__(self, num_images: int, seed: int, factors: NDArray[np.float64] | None) -> None:
        self.factors = factors
        self.length = num_images if factors is None else int(factors.sum().round(DIGITS))
        # Torch shuffles by seed + epoch; spread the seeds, or run 1 would begin with the second
        # epoch of run 0.
        self._seed = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> np.uint64(1))
        self._shuffled: DistributedSampler[int] = DistributedSampler(
            range(num_images),  # type: ignore[arg-type]  # it only asks for the length
            num_replicas=1,
            rank=0,
            shuffle=True,
            seed=self._seed,
        )

    def of_epoch(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch: ``length`` positions."""
        self._shuffled.set_epoch(epoch)
        images = np.fromiter(self._shuffled, dtype=np.int64, count=len(self._shuffled))
        if self.factors is None:
            return EpochOrder(images, np.zeros_like(images))
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, epoch])))
        return self._repeated(images, self.factors[images], generator)

    def _repeated(
        self, images: NDArray[np.int64], factors: NDArray[np.float64], generator: np.random.Generator
    ) -> EpochOrder:
        """Sample systematically: round the cumulative factors with one common random fraction."""
        ends = np.floor(np.cumsum(factors).round(DIGITS) + generator.random()).astype(np.int64)
        counts = np.diff(ends, prepend=0)
        indices = np.repeat(images, counts)
        repeats = np.arange(len(indices)) - np.repeat(np.cumsum(counts) - counts, counts)
        shuffled = generator.permutation(len(indices))[: self.length]
        return EpochOrder(indices[shuffled], repeats[shuffled])


class Shapes(NamedTuple):
    """The rectangle of each step (S,), as shares of the image size."""

    heights: NDArray[np.float64]
    widths: NDArray[np.float64]


def grouped_by_shape(
    order: EpochOrder,
    sizes: NDArray[np.int32],
    batch_size: int,
    generator: np.random.Generator,
    largest: tuple[float, float] | None = None,
) -> tuple[EpochOrder, Shapes]:
    """Group images of similar aspect into steps of ``batch_size``; return order and rectangles.

    ``sizes`` (N, 2) are heights and widths. Among equal aspects the given order decides. The
    generator shuffles the steps. With ``largest``, the result of ``largest_rectangle``, the step
    that fills it best comes first and is padded to it.
    """
    steps = len(order.indices) // batch_size
    order = EpochOrder(*(column[: steps * batch_size] for column in order))
    sides, aspect = _shares(sizes[order.indices])
    positions = np.argsort(aspect, kind="stable").reshape(steps, batch_size)
    rectangles = sides[positions].max(axis=1)
    numbers = generator.permutation(steps)
    if largest is not None:
        padded = np.maximum(rectangles[numbers], largest)
        place = int(np.lexsort((-rectangles[numbers].prod(axis=1), padded.prod(axis=1)))[0])
        rectangles[numbers[place]] = padded[place]
        numbers[[0, place]] = numbers[[place, 0]]
    arranged = positions[numbers].ravel()
    return EpochOrder(*(column[arranged] for column in order)), Shapes(*rectangles[numbers].T)


def largest_rectangle(
    sizes: NDArray[np.int32], batch_size: int, left_out: int, area: Callable[[float, float], float]
) -> tuple[float, float]:
    """Return height and width, as shares of the image size, of the largest step of any epoch.

    ``sizes`` as for ``grouped_by_shape``. Each epoch leaves out ``left_out`` other positions, which
    changes the images that share a step. ``area`` of height and width ranks the rectangles.
    """
    sides, aspect = _shares(sizes)
    _, kinds, counts = np.unique(aspect, return_inverse=True, return_counts=True)
    of_kind = np.stack([sides[kinds == kind].max(axis=0) for kind in range(len(counts))])
    # A step may hold one image each of the first and last kind, and those between, less the left
    # out.
    between = batch_size - 2 + left_out if batch_size > 1 else -1
    rectangles_of_steps = []
    for first in range(len(counts)):
        last = first
        while last + 1 < len(counts) and counts[first + 1 : last + 1].sum() <= between:
            last += 1
        rectangles_of_steps.append(tuple(of_kind[first : last + 1].max(axis=0).tolist()))
    return max(rectangles_of_steps, key=lambda rectangle: area(*rectangle))


def _shares(sizes: NDArray[np.int32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return sides as shares of the longer one, and a number that rises from wide to tall.

    The number has steps of 1/32, so images of nearly equal aspect keep their order.
    """
    sides = sizes / sizes.max(axis=1, keepdims=True)
    return sides, np.round((sides[:, 0] - sides[:, 1]) * 32)
