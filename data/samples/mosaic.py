"""Place the images of a training picture on its canvas: one alone, or a mosaic of four or nine.

The canvas is unbounded, and its origin is the centre of the sample. Sizes and positions of the
scaled images are whole pixels, so a canvas could be pasted together. None ever is: a sample draws
its tiles straight from the decoded images.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from data.geometry import Matrix, Point, Size, scaled_size


class Placed(NamedTuple):
    """An image of ``size`` scaled to ``scaled``, both (height, width), on the canvas.

    Its top left corner lies at ``corner`` (x, y).
    """

    size: Size
    scaled: Size
    corner: Point

    def matrix(self) -> Matrix:
        """Return the matrix from the image to the canvas."""
        factor_x, factor_y = self.scaled[1] / self.size[1], self.scaled[0] / self.size[0]
        return np.array([[factor_x, 0, self.corner[0]], [0, factor_y, self.corner[1]], [0, 0, 1]])


class Arrangement(NamedTuple):
    """Images on a canvas; each has a corner whose x and y are those of ``low`` or ``high``."""

    placed: list[Placed]
    low: Point
    high: Point


def alone(size: Size, target: Size) -> Arrangement:
    """Place one image, scaled to fit ``target`` and centred."""
    height, width = scaled_size(size, target, upscale=True)
    left, top = (target[1] - width) // 2 - target[1] // 2, (target[0] - height) // 2 - target[0] // 2
    return Arrangement([Placed(size, (height, width), (left, top))], (left, top), (left + width, top + height))


def mosaic_of_four(sizes: list[Size], target: Size, generator: np.random.Generator) -> Arrangement:
    """Place four images, each scaled to fit ``target``, around one random point.

    The point lies at most half a target from the centre. This is the mosaic of the published
    systems, except that no canvas edge cuts the images.
    """
    x, y = _offset(target, generator)
    placed = []
    for size, (right, below) in zip(sizes, ((0, 0), (1, 0), (0, 1), (1, 1)), strict=True):
        height, width = scaled_size(size, target, upscale=True)
        placed.append(Placed(size, (height, width), (x - (1 - right) * width, y - (1 - below) * height)))
    return Arrangement(placed, (x, y), (x, y))


def mosaic_of_nine(sizes: list[Size], target: Size, generator: np.random.Generator) -> Arrangement:
    """Place nine images: one scaled to fit ``target``, four along its sides, four at its corners.

    The first image's centre lies at most half a target from that of the sample. An image along a
    side is at most as long as that side, and starts where the side starts, clockwise.
    """
    x, y = _offset(target, generator)
    height, width = scaled_size(sizes[0], target, upscale=True)
    left, top = x - width // 2, y - height // 2
    right, bottom = left + width, top + height
    placed = [Placed(sizes[0], (height, width), (left, top))]
    # Room, touched corner of the first image, and whether it lies left of and above that corner.
    neighbours = (
        ((target[0], width), (left, top), 0, 1),  # above
        (target, (right, top), 0, 1),
        ((height, target[1]), (right, top), 0, 0),  # right
        (target, (right, bottom), 0, 0),
        ((target[0], width), (right, bottom), 1, 0),  # below
        (target, (left, bottom), 1, 0),
        ((height, target[1]), (left, bottom), 1, 1),  # left
        (target, (left, top), 1, 1),
    )
    for size, (room, point, is_left, is_above) in zip(sizes[1:], neighbours, strict=True):
        scaled = scaled_size(size, room, upscale=True)
        corner = (point[0] - is_left * scaled[1], point[1] - is_above * scaled[0])
        placed.append(Placed(size, scaled, corner))
    return Arrangement(placed, (left, top), (right, bottom))


def _offset(target: Size, generator: np.random.Generator) -> Point:
    """Draw a point, in whole pixels, at most half a target from the origin."""
    x, y = generator.uniform(-0.5, 0.5, 2).tolist()
    return round(x * target[1]), round(y * target[0])
