"""Matrices that map one picture to another, and the boxes they move.

Coordinates are continuous: pixel i of a row covers i..i + 1, so scaling an image scales its boxes
by the same factor.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from data.config import AugmentConfig, Resize

Image = NDArray[np.uint8]  # (h, w, 3) RGB
Boxes = NDArray[np.float32]  # (n, 4) left, top, right, bottom in pixels
Matrix = NDArray[np.float64]  # (3, 3) maps (x, y, 1) of one picture to another; the last row is 0, 0, 1
Size = tuple[int, int]  # height, width in pixels
ImageSize = int | Sequence[int]  # as options say it: the side of a square, or height and width
Point = tuple[int, int]  # x, y in pixels

MIN_SIDE = 2.0  # pixels; smaller boxes are not usable as targets
MIN_VISIBLE = 0.2  # share of a box's area that must be left after clipping
MAX_ASPECT = 20.0  # longer boxes are slivers of objects cut at an edge
PAD_VALUE = 114  # grey of the letterbox, as in all YOLO systems


def random_affine(augment: AugmentConfig, target: Size, generator: np.random.Generator) -> Matrix:
    """Draw scale, rotation, shear, flips and shift, applied in this order.

    The origin maps to the centre of a picture of ``target`` (height, width), plus the shift.
    """
    height, width = target
    zoom, turn, slant_x, slant_y, shift_x, shift_y = generator.uniform(-1, 1, 6).tolist()
    scale = 1 + augment.scale * zoom
    angle = math.radians(augment.degrees * turn)
    shear_x, shear_y = math.tan(math.radians(augment.shear * slant_x)), math.tan(math.radians(augment.shear * slant_y))
    flips = generator.random(2) < (augment.flip_horizontal, augment.flip_vertical)
    mirror_x, mirror_y = (1 - 2 * flips).tolist()

    cosine, sine = scale * math.cos(angle), scale * math.sin(angle)
    rotation = np.array([[cosine, -sine, 0], [sine, cosine, 0], [0, 0, 1]])
    shear = np.array([[mirror_x, mirror_x * shear_x, 0], [mirror_y * shear_y, mirror_y, 0], [0, 0, 1]])
    matrix: Matrix = shear @ rotation
    matrix[:2, 2] = (0.5 + augment.translate * shift_x) * width, (0.5 + augment.translate * shift_y) * height
    return matrix


def is_upright(matrix: Matrix) -> bool:
    """Whether rows stay rows and columns stay columns: no rotation or shear."""
    return not (matrix[0, 1] or matrix[1, 0])


def snapped(matrix: Matrix, low: Point, high: Point) -> Matrix:
    """Move and stretch an upright matrix by less than a pixel, so that two points land on pixels.

    A plain resize then draws a tile with exactly the pixels of a warp. Other matrices stay.
    """
    if not is_upright(matrix):
        return matrix
    result = matrix.copy()
    for axis in (0, 1):
        factor, shift = matrix[axis, axis], matrix[axis, 2]
        first = round(factor * low[axis] + shift)
        if high[axis] != low[axis]:
            length = max(1, round(abs(factor) * (high[axis] - low[axis])))
            factor = math.copysign(length / (high[axis] - low[axis]), factor)
        result[axis, axis], result[axis, 2] = factor, first - factor * low[axis]
    return result


def move_boxes(boxes_xyxy: Boxes, matrix: Matrix) -> Boxes:
    """Return upright boxes (n, 4) around boxes mapped by one matrix, or by one each (n, 3, 3)."""
    corners = boxes_xyxy[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 4, 2)
    points = corners @ matrix[..., :2, :2].swapaxes(-1, -2) + matrix[..., None, :2, 2]
    return np.concatenate([points.min(axis=1), points.max(axis=1)], axis=1).astype(np.float32)


def project(points: NDArray[np.floating[Any]], matrix: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Map points (..., 2) of x, y by ``matrix``."""
    return np.asarray(points @ matrix[:2, :2].T + matrix[:2, 2])


def both_sides(image_size: ImageSize) -> Size:
    """Height and width of an option ``image_size``: the side of a square, or both."""
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    return height, width


def scaled_size(image_size: Size, target: Size) -> Size:
    """Scale (height, width) by one ratio to fit ``target``."""
    height, width = image_size
    ratio = min(target[0] / height, target[1] / width)
    return max(1, round(height * ratio)), max(1, round(width * ratio))


def corner_points(size: Size) -> NDArray[np.float64]:
    """Return the corners (4, 2) of a picture of ``size``, clockwise from the top left."""
    height, width = size
    return np.array([[0, 0], [width, 0], [width, height], [0, height]], dtype=np.float64)


def visible_boxes(boxes_xyxy: Boxes, size: Size) -> tuple[Boxes, NDArray[np.bool_]]:
    """Clip boxes (n, 4) to a picture of ``size`` (height, width); say which (n,) remain usable.

    A usable box keeps more than ``MIN_VISIBLE`` of its area, has sides above ``MIN_SIDE`` pixels,
    and an aspect ratio below ``MAX_ASPECT``.
    """
    height, width = size
    clipped = boxes_xyxy.clip(0, np.array([width, height, width, height], dtype=np.float32))
    full = boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]
    inside = clipped[:, 2:] - clipped[:, :2]
    shorter, longer = inside.min(axis=1), inside.max(axis=1)
    usable = (
        (shorter > MIN_SIDE) & (longer < MAX_ASPECT * shorter) & (inside.prod(axis=1) > MIN_VISIBLE * full.prod(axis=1))
    )
    return clipped, usable


class Letterbox(NamedTuple):
    """The scale and the shift, in pixels, from an image to its network input."""

    ratio_x: float
    ratio_y: float
    pad_x: float
    pad_y: float

    def to_network(self, boxes_xyxy: Boxes) -> Boxes:
        """Map boxes from pixels of the original image to pixels of the network input."""
        scale, shift = (self.ratio_x, self.ratio_y) * 2, (self.pad_x, self.pad_y) * 2
        return np.asarray(boxes_xyxy * np.array(scale) + np.array(shift), dtype=np.float32)

    def to_original(self, boxes_xyxy: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """Map boxes back to pixels of the original image, without clipping them."""
        scale, shift = (self.ratio_x, self.ratio_y) * 2, (self.pad_x, self.pad_y) * 2
        return np.asarray((boxes_xyxy - np.array(shift, dtype=np.float64)) / np.array(scale))


def resize_into(canvas: Image, image: Image, resize: Resize) -> Letterbox:
    """Resize an image into the canvas.

    A letterbox scales it to fit, by area average if it shrinks and linearly if it grows, centres it
    and fills the rest with grey. Stretching is linear, as in Darknet and OpenCV. The returned
    ratios are those of the rounded size, so ``to_original`` is the exact inverse.
    """
    (height, width), (canvas_height, canvas_width) = image.shape[:2], canvas.shape[:2]
    if resize == Resize.stretch:
        cv2.resize(image, (canvas_width, canvas_height), dst=canvas, interpolation=cv2.INTER_LINEAR)
        return Letterbox(canvas_width / width, canvas_height / height, 0, 0)
    new_height, new_width = scaled_size((height, width), (canvas_height, canvas_width))
    pad_y, pad_x = (canvas_height - new_height) // 2, (canvas_width - new_width) // 2
    canvas.fill(PAD_VALUE)
    inner = canvas[pad_y : pad_y + new_height, pad_x : pad_x + new_width]
    if inner.shape == image.shape:
        inner[:] = image
    else:
        shrinks = new_height < height or new_width < width
        interpolation = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
        cv2.resize(image, (new_width, new_height), dst=inner, interpolation=interpolation)
    return Letterbox(new_width / width, new_height / height, pad_x, pad_y)


def cut_at_edges(boxes_xyxy: NDArray[np.float64], size: Size) -> NDArray[np.float64]:
    """Clip boxes (n, 4) to an image of ``size`` (height, width)."""
    height, width = size
    return boxes_xyxy.clip(0, np.array([width, height, width, height], dtype=np.float64))
