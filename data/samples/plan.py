"""What a training sample is made of, all of it drawn before any pixel is touched.

A plan is a function of the run's seed and the request, so of nothing that a worker, a rank or the past could change.
``data/samples/dataset.py`` turns plans into pixels quickly, ``data/samples/reference_path.py`` plainly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data.augment_config import AugmentConfig
from data.geometry import Matrix, Size, random_homography, snapped
from data.samples.mosaic import Arrangement, Placed, alone, mosaic_of_four, mosaic_of_nine


@dataclass(frozen=True, slots=True)
class Request:
    """One sample asked of a data set: the image at ``index``, at ``height`` x ``width`` pixels.

    ``repeat`` counts the earlier requests for the same image in this epoch. ``pool`` are the positions that a mosaic's
    and a mixture's other images are drawn from; empty: all of the data set.
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
        """For each image the matrix that maps it to the sample."""
        return [self.canvas_to_sample @ placed.matrix() for placed in self.placed]


@dataclass(frozen=True, slots=True)
class Plan:
    """A sample: one picture or a mixture of two, objects of another image, and the gains of its colours."""

    size: Size
    pictures: list[Picture]
    share: float  # of the first picture in the mixture; 1 where there is one picture
    gains: NDArray[np.float64]  # (3,) factors on hue, saturation and value
    donor: Picture | None = None  # an image of which some objects are copied into the sample,
    donor_seed: int = 0  # which says which ones

    def all_pictures(self) -> list[Picture]:
        """The pictures, the donor last."""
        return [*self.pictures, *([self.donor] if self.donor is not None else [])]


def draw_plan(
    request: Request, sizes: NDArray[np.int32], augment: AugmentConfig, seed: int, combine: bool = True
) -> Plan:
    """Draws the plan of one sample.

    ``sizes`` (N, 2) are the heights and widths of the data set's images. Without ``combine``, as in the last epochs, an
    image is not put together with others.
    """
    seeds = np.random.SeedSequence([seed, request.epoch, request.index, request.repeat])
    generator = np.random.Generator(np.random.PCG64(seeds))
    gains = 1 + generator.uniform(-1, 1, 3) * [augment.hsv_hue, augment.hsv_saturation, augment.hsv_value]
    mixes = generator.random() < augment.mixup and combine
    pictures, share = [_draw_picture(request.index, request, sizes, augment, generator, combine)], 1.0
    if mixes:
        (other,) = _draw_others(1, request, len(sizes), generator)
        pictures.append(_draw_picture(other, request, sizes, augment, generator, combine))
        share = float(generator.beta(augment.mixup_beta, augment.mixup_beta))
    donor, donor_seed = None, 0
    if augment.copy_paste and combine and generator.random() < augment.copy_paste:
        (other,) = _draw_others(1, request, len(sizes), generator)
        donor = _draw_picture(other, request, sizes, augment, generator, combine=False)
        donor_seed = int(generator.integers(2**63))
    return Plan((request.height, request.width), pictures, share, gains, donor, donor_seed)


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
    arrangement = _arrange([(height, width) for height, width in sizes[indices].tolist()], target, generator)
    drawn = random_homography(augment, target, generator)
    return Picture(indices, arrangement.placed, snapped(drawn, arrangement.low, arrangement.high))


def _arrange(sizes: list[Size], target: Size, generator: np.random.Generator) -> Arrangement:
    if len(sizes) == 1:
        return alone(sizes[0], target)
    return (mosaic_of_four if len(sizes) == 4 else mosaic_of_nine)(sizes, target, generator)


def _draw_others(count: int, request: Request, num_images: int, generator: np.random.Generator) -> Sequence[int]:
    """Positions of other images: any of the data set, or different ones of the pool as long as it has enough."""
    if not request.pool:
        return [int(index) for index in generator.integers(num_images, size=count)]
    pool = [index for index in request.pool if index != request.index] or [request.index]
    if len(pool) < count:
        return [pool[number] for number in generator.integers(len(pool), size=count)]
    return [pool[number] for number in generator.permutation(len(pool))[:count]]
