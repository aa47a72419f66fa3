"""Plan a training sample: draw all that is random before any pixel is touched.

A plan depends only on the run's seed and the request. Images lie on an unbounded canvas whose
origin is the centre of the sample, at whole pixels and scaled to whole pixels. The canvas is never
made: ``data/dataset.py`` draws each image straight into the sample.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from data.config import AugmentConfig
from data.geometry import Matrix, Size, scaled_size

Point = tuple[int, int]  # x, y in pixels
Sizes = NDArray[np.int32]  # (N, 2) height, width of all images

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


class Placed(NamedTuple):
    """An image on the canvas."""

    position: int  # in the data set
    size: Size  # of the image
    scaled: Size  # on the canvas
    corner: Point  # the top left one


class Picture(NamedTuple):
    """Images on a canvas, and the matrix that maps the canvas to the sample."""

    placed: list[Placed]
    canvas_to_sample: Matrix


class Plan(NamedTuple):
    """A sample: one picture or a blend of two, and colour gains."""

    size: Size
    pictures: list[Picture]
    share: float  # weight of the first picture in the blend; 1 for a single picture
    gains: NDArray[np.float64]  # (3,) factors on hue, saturation and value


def draw_plan(request: Request, sizes: Sizes, augment: AugmentConfig, seed: int) -> Plan:
    """Draw the plan of one sample; ``sizes`` (N, 2) are heights and widths of all images."""
    generator = np.random.default_rng([seed, request.epoch, request.index, request.repeat])
    gains = 1 + generator.uniform(-1, 1, 3) * [augment.hsv_hue, augment.hsv_saturation, augment.hsv_value]
    count = 2 if generator.random() < augment.mixup else 1
    images, size = _images(request, generator), (request.height, request.width)
    pictures = [_draw_picture(images, size, sizes, augment, generator) for _ in range(count)]
    share = float(generator.beta(MIXUP_BETA, MIXUP_BETA)) if count == 2 else 1.0
    return Plan(size, pictures, share, gains)


def _images(request: Request, generator: Generator) -> Iterator[int]:
    """The request's image, then the others of its pool in random order, again and again."""
    yield request.index
    pool = np.array(request.pool, np.int64)
    others = pool[pool != request.index]
    while True:
        yield from generator.permutation(others).tolist() or [request.index]


def _draw_picture(
    images: Iterator[int], target: Size, sizes: Sizes, augment: AugmentConfig, generator: Generator
) -> Picture:
    """Draw an image in the middle, or a mosaic of four, each scaled to fit ``target``.

    A mosaic meets at a random point at most half a target from the centre. Unlike in published
    systems, the edge of a canvas does not cut its images.
    """
    is_mosaic = generator.random() < augment.mosaic
    indices = list(islice(images, 4 if is_mosaic else 1))
    x = y = 0
    if is_mosaic:
        x, y = np.round(generator.uniform(-0.5, 0.5, 2) * target[::-1]).astype(int).tolist()
    placed = []
    for number, (index, size) in enumerate(zip(indices, sizes[indices].tolist(), strict=True)):
        height, width = scaled_size(size, target)
        if is_mosaic:
            left = x if number % 2 else x - width
            top = y if number >= 2 else y - height
        else:
            left = (target[1] - width) // 2 - target[1] // 2
            top = (target[0] - height) // 2 - target[0] // 2
        placed.append(Placed(index, tuple(size), (height, width), (left, top)))
    low, high = ((x, y), (x, y)) if is_mosaic else ((left, top), (left + width, top + height))
    return Picture(placed, snapped(random_affine(augment, target, generator), low, high))


def random_affine(augment: AugmentConfig, target: Size, generator: Generator) -> Matrix:
    """Draw scale, rotation, shear, flips and shift, applied in this order.

    The origin maps to the centre of a picture of ``target`` (height, width), plus the shift.
    """
    height, width = target
    zoom, turn, slant_x, slant_y, shift_x, shift_y = generator.uniform(-1, 1, 6).tolist()
    scale, angle = 1 + augment.scale * zoom, math.radians(augment.degrees * turn)
    shear_x = math.tan(math.radians(augment.shear * slant_x))
    shear_y = math.tan(math.radians(augment.shear * slant_y))
    flips = generator.random(2) < (augment.flip_horizontal, augment.flip_vertical)
    mirror_x, mirror_y = (1 - 2 * flips).tolist()
    cosine, sine = scale * math.cos(angle), scale * math.sin(angle)
    rotation = np.array([[cosine, -sine, 0], [sine, cosine, 0], [0, 0, 1]])
    shear = np.array([[mirror_x, mirror_x * shear_x, 0], [mirror_y * shear_y, mirror_y, 0], [0, 0, 1]])
    matrix: Matrix = shear @ rotation
    matrix[0, 2] = (0.5 + augment.translate * shift_x) * width
    matrix[1, 2] = (0.5 + augment.translate * shift_y) * height
    return matrix


def snapped(matrix: Matrix, low: Point, high: Point) -> Matrix:
    """Move and stretch an upright matrix by less than a pixel, so that two points land on pixels.

    A plain resize then draws a tile with exactly the pixels of a warp. Other matrices stay.
    """
    if matrix[0, 1] or matrix[1, 0]:
        return matrix
    for axis in (0, 1):
        factor, shift = matrix[axis, axis], matrix[axis, 2]
        first = round(factor * low[axis] + shift)
        length = high[axis] - low[axis]
        if length:
            factor = math.copysign(max(1, round(abs(factor) * length)) / length, factor)
        matrix[axis, axis], matrix[axis, 2] = factor, first - factor * low[axis]
    return matrix
