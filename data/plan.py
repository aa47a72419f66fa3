"""Plan a training sample: draw all that is random before any pixel is touched.

A plan depends only on the run's seed and the request. Images lie on an unbounded canvas whose
origin is the centre of the sample, at whole pixels and scaled to whole pixels. The canvas is never
made: ``data/dataset.py`` draws each image straight into the sample.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from data.config import AugmentConfig
from data.geometry import Matrix, Point, Size, random_affine, scaled_size, snapped

MOST_OTHERS = 7  # images of a sample besides its own: two mosaics of four
MIXUP_BETA = 32.0  # weights of blends are drawn from Beta(32, 32): near 1/2


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one sample: the image at ``index``, at ``height`` x ``width`` pixels.

    ``repeat`` counts earlier requests for the image in this epoch. Mosaic and mixup draw their
    other images from ``pool``; if it has none, they repeat the image.
    """

    index: int
    height: int
    width: int
    epoch: int
    repeat: int = 0
    pool: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Placed:
    """An image on the canvas."""

    size: Size  # of the image
    scaled: Size  # on the canvas
    corner: Point  # the top left one

    def matrix(self) -> Matrix:
        """Return the matrix from the image to the canvas."""
        factor_x, factor_y = self.scaled[1] / self.size[1], self.scaled[0] / self.size[0]
        return np.array([[factor_x, 0, self.corner[0]], [0, factor_y, self.corner[1]], [0, 0, 1]])


# Images and two points, low and high, that have the x and y of a corner of each image.
Arrangement = tuple[list[Placed], Point, Point]


@dataclass(frozen=True, slots=True)
class Picture:
    """Images on a canvas, and the matrix that maps the canvas to the sample."""

    indices: list[int]
    placed: list[Placed]
    canvas_to_sample: Matrix


@dataclass(frozen=True, slots=True)
class Plan:
    """A sample: one picture or a blend of two, and colour gains."""

    size: Size
    pictures: list[Picture]
    share: float  # weight of the first picture in the blend; 1 for a single picture
    gains: NDArray[np.float64]  # (3,) factors on hue, saturation and value


def draw_plan(request: Request, sizes: NDArray[np.int32], augment: AugmentConfig, seed: int) -> Plan:
    """Draw the plan of one sample; ``sizes`` (N, 2) are heights and widths of all images."""
    generator = np.random.default_rng([seed, request.epoch, request.index, request.repeat])
    gains = 1 + generator.uniform(-1, 1, 3) * [augment.hsv_hue, augment.hsv_saturation, augment.hsv_value]
    mixes = generator.random() < augment.mixup
    images = _images(request, generator)
    pictures, share = [_draw_picture(images, request, sizes, augment, generator)], 1.0
    if mixes:
        pictures.append(_draw_picture(images, request, sizes, augment, generator))
        share = float(generator.beta(MIXUP_BETA, MIXUP_BETA))
    return Plan((request.height, request.width), pictures, share, gains)


def _images(request: Request, generator: np.random.Generator) -> Iterator[int]:
    """The request's image, then the others of its pool in random order, again and again."""
    yield request.index
    others = [index for index in request.pool if index != request.index] or [request.index]
    while True:
        yield from [others[number] for number in generator.permutation(len(others))]


def _draw_picture(
    images: Iterator[int],
    request: Request,
    sizes: NDArray[np.int32],
    augment: AugmentConfig,
    generator: np.random.Generator,
) -> Picture:
    target = (request.height, request.width)
    indices = list(islice(images, 4 if generator.random() < augment.mosaic else 1))
    of_images: list[Size] = list(map(tuple, sizes[indices].tolist()))
    if len(indices) == 1:
        placed, low, high = place_one(of_images[0], target)
    else:
        placed, low, high = place_four(of_images, target, generator)
    return Picture(indices, placed, snapped(random_affine(augment, target, generator), low, high))


def place_one(size: Size, target: Size) -> Arrangement:
    """Place one image, scaled to fit ``target`` and centred."""
    height, width = scaled_size(size, target)
    left, top = (target[1] - width) // 2 - target[1] // 2, (target[0] - height) // 2 - target[0] // 2
    return [Placed(size, (height, width), (left, top))], (left, top), (left + width, top + height)


def place_four(sizes: list[Size], target: Size, generator: np.random.Generator) -> Arrangement:
    """Place a mosaic of four images, each scaled to fit ``target``, around one random point.

    The point is at most half a target from the centre. Unlike in published systems, the edge of a
    canvas does not cut the images.
    """
    shares = generator.uniform(-0.5, 0.5, 2).tolist()
    x, y = round(shares[0] * target[1]), round(shares[1] * target[0])
    placed = []
    for size, (right, below) in zip(sizes, ((0, 0), (1, 0), (0, 1), (1, 1)), strict=True):
        height, width = scaled_size(size, target)
        placed.append(Placed(size, (height, width), (x - (1 - right) * width, y - (1 - below) * height)))
    return placed, (x, y), (x, y)
