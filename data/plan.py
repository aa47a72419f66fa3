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
        height, width = self.scaled
        x, y = self.corner
        return np.array([[width / self.size[1], 0, x], [0, height / self.size[0], y], [0, 0, 1]])


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
    most = [augment.hsv_hue, augment.hsv_saturation, augment.hsv_value]
    gains = 1 + generator.uniform(-1, 1, 3) * most
    mixes = generator.random() < augment.mixup
    images = _images(request, generator)
    pictures = [_draw_picture(images, request, sizes, augment, generator)]
    share = 1.0
    if mixes:
        pictures.append(_draw_picture(images, request, sizes, augment, generator))
        share = float(generator.beta(MIXUP_BETA, MIXUP_BETA))
    return Plan((request.height, request.width), pictures, share, gains)


def _images(request: Request, generator: np.random.Generator) -> Iterator[int]:
    """The request's image, then the others of its pool in random order, again and again."""
    yield request.index
    others = [index for index in request.pool if index != request.index] or [request.index]
    while True:
        yield from generator.permutation(others).tolist()


def _draw_picture(
    images: Iterator[int],
    request: Request,
    sizes: NDArray[np.int32],
    augment: AugmentConfig,
    generator: np.random.Generator,
) -> Picture:
    target = (request.height, request.width)
    is_mosaic = generator.random() < augment.mosaic
    indices = list(islice(images, 4 if is_mosaic else 1))
    of_images = [(height, width) for height, width in sizes[indices].tolist()]
    if is_mosaic:
        placed, low, high = place_four(of_images, target, generator)
    else:
        placed, low, high = place_one(of_images[0], target)
    return Picture(indices, placed, snapped(random_affine(augment, target, generator), low, high))


def place_one(size: Size, target: Size) -> Arrangement:
    """Place one image, scaled to fit ``target`` and centred."""
    height, width = scaled_size(size, target)
    left = (target[1] - width) // 2 - target[1] // 2
    top = (target[0] - height) // 2 - target[0] // 2
    return [Placed(size, (height, width), (left, top))], (left, top), (left + width, top + height)


def place_four(sizes: list[Size], target: Size, generator: np.random.Generator) -> Arrangement:
    """Place a mosaic of four images, each scaled to fit ``target``, around one random point.

    The point is at most half a target from the centre. Unlike in published systems, the edge of a
    canvas does not cut the images.
    """
    shares = generator.uniform(-0.5, 0.5, 2)
    x, y = np.round(shares * target[::-1]).astype(int).tolist()
    placed = []
    for number, size in enumerate(sizes):
        height, width = scaled_size(size, target)
        left = x if number % 2 else x - width
        top = y if number >= 2 else y - height
        placed.append(Placed(size, (height, width), (left, top)))
    return placed, (x, y), (x, y)
