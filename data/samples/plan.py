"""Plan a training sample: draw all that is random before any pixel is touched.

A plan depends only on the run's seed and the request, not on the worker, the rank or earlier
samples. ``data/samples/dataset.py`` draws plans fast, ``scripts/bench/reference_path.py`` plainly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data.augment_config import AugmentConfig
from data.geometry import Matrix, Size, random_homography, snapped
from data.samples.mosaic import Placed, alone, mosaic_of_four, mosaic_of_nine

MIXUP_BETA = 32.0  # weights of blends are drawn from Beta(32, 32): near 1/2


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one sample: the image at ``index``, at ``height`` x ``width`` pixels.

    ``repeat`` counts earlier requests for the same image in this epoch. Mosaic and mixup
    draw their other images from the positions in ``pool``, or from the whole data set if it is
    empty.
    """

    index: int
    height: int
    width: int
    epoch: int
    repeat: int = 0
    pool: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Picture:
    """Images on a canvas, and the matrix that maps the canvas to the sample."""

    indices: list[int]
    placed: list[Placed]
    canvas_to_sample: Matrix

    def matrices(self) -> list[Matrix]:
        """Return the matrix from each image to the sample."""
        return [self.canvas_to_sample @ placed.matrix() for placed in self.placed]


@dataclass(frozen=True, slots=True)
class Plan:
    """A sample: one picture or a blend of two, and colour gains."""

    size: Size
    pictures: list[Picture]
    share: float  # weight of the first picture in the blend; 1 for a single picture
    gains: NDArray[np.float64]  # (3,) factors on hue, saturation and value


def draw_plan(
    request: Request, sizes: NDArray[np.int32], augment: AugmentConfig, seed: int, combine: bool = True
) -> Plan:
    """Draw the plan of one sample.

    ``sizes`` (N, 2) are the heights and widths of the data set's images. ``combine=False``, as in
    the last epochs, switches off mosaic and mixup.
    """
    seeds = np.random.SeedSequence([seed, request.epoch, request.index, request.repeat])
    generator = np.random.Generator(np.random.PCG64(seeds))
    gains = 1 + generator.uniform(-1, 1, 3) * [augment.hsv_hue, augment.hsv_saturation, augment.hsv_value]
    mixes = generator.random() < augment.mixup and combine
    pictures, share = [_draw_picture(request.index, request, sizes, augment, generator, combine)], 1.0
    if mixes:
        (other,) = _draw_others(1, request, len(sizes), generator)
        pictures.append(_draw_picture(other, request, sizes, augment, generator, combine))
        share = float(generator.beta(MIXUP_BETA, MIXUP_BETA))
    return Plan((request.height, request.width), pictures, share, gains)


def _draw_picture(
    index: int,
    request: Request,
    sizes: NDArray[np.int32],
    augment: AugmentConfig,
    generator: np.random.Generator,
    combine: bool,
) -> Picture:
    target = (request.height, request.width)
    is_mosaic, is_nine = (generator.random(2) < (augment.mosaic, augment.mosaic_nine)).tolist()
    indices = [index]
    if is_mosaic and combine:
        indices += _draw_others(8 if is_nine else 3, request, len(sizes), generator)
    of_images = [(height, width) for height, width in sizes[indices].tolist()]
    if len(indices) == 1:
        arrangement = alone(of_images[0], target)
    else:
        arrangement = (mosaic_of_nine if is_nine else mosaic_of_four)(of_images, target, generator)
    drawn = random_homography(augment, target, generator)
    return Picture(indices, arrangement.placed, snapped(drawn, arrangement.low, arrangement.high))


def _draw_others(count: int, request: Request, num_images: int, generator: np.random.Generator) -> Sequence[int]:
    """Draw other images from the data set, or from the pool: distinct ones if it has enough."""
    if not request.pool:
        return [int(index) for index in generator.integers(num_images, size=count)]
    pool = [index for index in request.pool if index != request.index] or [request.index]
    if len(pool) < count:
        return [pool[number] for number in generator.integers(len(pool), size=count)]
    return [pool[number] for number in generator.permutation(len(pool))[:count]]
