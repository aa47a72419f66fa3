"""Geometry and colour of images and boxes. All functions are pure: what is random comes from a generator handed in.

Coordinates are continuous: pixel i of a row covers i..i + 1, so an image w pixels wide spans 0..w and scaling an image
scales its boxes by the very same factor. OpenCV's warp puts whole numbers at pixel centres; ``warp_into`` converts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from data.config import AugmentConfig

Image = NDArray[np.uint8]  # (h, w, 3) RGB
Boxes = NDArray[np.float32]  # (n, 4) left, top, right, bottom in pixels
Matrix = NDArray[np.float64]  # (3, 3) maps (x, y, 1) of one picture to another

PAD_VALUE = 114  # grey of the letterbox, as in all systems of this family
MIN_SIDE = 2.0  # pixels: smaller boxes give no usable target
MAX_ASPECT = 20.0  # longer slivers are what a border left of an object


class Letterbox(NamedTuple):
    """How an image was fitted into a larger one: scaled by the ratios, then shifted by whole pixels."""

    ratio_x: float
    ratio_y: float
    pad_x: int
    pad_y: int

    def to_network(self, boxes_xyxy: Boxes) -> Boxes:
        """Boxes of the original image in pixels of the letterboxed one."""
        scale, shift = self._scale_and_shift()
        return (boxes_xyxy * scale + shift).astype(np.float32)

    def to_original(self, boxes_xyxy: Boxes) -> Boxes:
        """Boxes of the letterboxed image in pixels of the original one; not clipped."""
        scale, shift = self._scale_and_shift()
        return ((boxes_xyxy - shift) / scale).astype(np.float32)

    def _scale_and_shift(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return np.array([self.ratio_x, self.ratio_y] * 2), np.array([self.pad_x, self.pad_y] * 2, dtype=np.float64)


def scaled_size(image_size: tuple[int, int], target: tuple[int, int], upscale: bool) -> tuple[int, int]:
    """The (height, width) of an image scaled by one ratio to fit ``target``; enlarged only where ``upscale``."""
    height, width = image_size
    ratio = min(target[0] / height, target[1] / width)
    if not upscale:
        ratio = min(ratio, 1.0)
    return max(1, round(height * ratio)), max(1, round(width * ratio))


def letterbox_into(canvas: Image, image: Image, upscale: bool) -> Letterbox:
    """Scales an image to fit the canvas, centres it there and fills the rest with grey; returns how.

    Shrinks by area average, enlarges linearly. The stored ratios are those of the rounded size, so ``to_original``
    inverts what happened to the pixels.
    """
    height, width = image.shape[:2]
    new_height, new_width = scaled_size((height, width), canvas.shape[:2], upscale)
    pad_y, pad_x = (canvas.shape[0] - new_height) // 2, (canvas.shape[1] - new_width) // 2
    shrinks = new_height < height or new_width < width
    canvas.fill(PAD_VALUE)
    inner = canvas[pad_y : pad_y + new_height, pad_x : pad_x + new_width]
    if inner.shape == image.shape:
        inner[:] = image
    else:
        interpolation = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
        cv2.resize(image, (new_width, new_height), dst=inner, interpolation=interpolation)
    return Letterbox(new_width / width, new_height / height, pad_x, pad_y)


def letterbox(image: Image, size: tuple[int, int], upscale: bool) -> tuple[Image, Letterbox]:
    """The letterboxed image as a new array of ``size`` (height, width); see ``letterbox_into``."""
    canvas = np.empty((*size, 3), dtype=np.uint8)
    return canvas, letterbox_into(canvas, image, upscale)


def fit_matrix(image_size: tuple[int, int], target: tuple[int, int]) -> Matrix:
    """Scales an image to fit ``target`` (height, width) and centres it on the origin."""
    height, width = image_size
    ratio = min(target[0] / height, target[1] / width)
    return np.array([[ratio, 0, -ratio * width / 2], [0, ratio, -ratio * height / 2], [0, 0, 1]])


def mosaic_matrices(
    image_sizes: list[tuple[int, int]], target: tuple[int, int], generator: np.random.Generator
) -> list[Matrix]:
    """Places four images, each scaled to fit ``target`` (height, width), around a random point; origin as below.

    The mosaic of the reference systems (reference.md section 3): a canvas of twice the target whose centre is the
    origin here, the images meeting at a point drawn from the middle half of it. No canvas is ever made, so nothing is
    cut at its edge.
    """
    height, width = target
    x = generator.uniform(-0.5, 0.5) * width
    y = generator.uniform(-0.5, 0.5) * height
    matrices = []
    corners = ((-1, -1), (1, -1), (-1, 1), (1, 1))  # top left, top right, bottom left, bottom right of the point
    for (side_x, side_y), size in zip(corners, image_sizes, strict=True):
        matrix = fit_matrix(size, target)
        matrix[0, 2] += x + side_x * matrix[0, 0] * size[1] / 2
        matrix[1, 2] += y + side_y * matrix[1, 1] * size[0] / 2
        matrices.append(matrix)
    return matrices


def random_affine(augment: AugmentConfig, target: tuple[int, int], generator: np.random.Generator) -> Matrix:
    """Draws scale, rotation, shear, flips and shift, in this order, around the origin.

    The origin goes to the centre of a picture of ``target`` (height, width), give or take the shift.
    """
    height, width = target
    scale = generator.uniform(1 - augment.scale, 1 + augment.scale)
    angle = math.radians(generator.uniform(-augment.degrees, augment.degrees))
    shear_x, shear_y = np.tan(np.radians(generator.uniform(-augment.shear, augment.shear, 2)))
    mirror_x = -1.0 if generator.random() < augment.flip_horizontal else 1.0
    mirror_y = -1.0 if generator.random() < augment.flip_vertical else 1.0
    shift_x, shift_y = generator.uniform(-augment.translate, augment.translate, 2)

    cosine, sine = scale * math.cos(angle), scale * math.sin(angle)
    rotation = np.array([[cosine, -sine, 0], [sine, cosine, 0], [0, 0, 1]])
    shear = np.array([[1, shear_x, 0], [shear_y, 1, 0], [0, 0, 1]])
    mirror = np.diag([mirror_x, mirror_y, 1.0])
    shift = np.array([[1, 0, (0.5 + shift_x) * width], [0, 1, (0.5 + shift_y) * height], [0, 0, 1]])
    matrix: Matrix = shift @ mirror @ shear @ rotation
    return matrix


def warp_into(canvas: Image, image: Image, matrix: Matrix) -> None:
    """Draws an image onto the canvas (h, w, 3) where ``matrix`` maps it, and leaves the rest of the canvas alone.

    One linear interpolation straight from the decoded image, over the part of the canvas that it can reach. Pixels on
    the image's edge are blended with what the canvas holds (OpenCV 5) or left out (before it).
    """
    height, width = image.shape[:2]
    corners = matrix[:2] @ np.array([[0, width, width, 0], [0, 0, height, height], [1, 1, 1, 1]], dtype=np.float64)
    left, top = np.maximum(np.floor(corners.min(axis=1)), 0).astype(int)
    right = min(math.ceil(corners[0].max()), canvas.shape[1])
    bottom = min(math.ceil(corners[1].max()), canvas.shape[0])
    if left >= right or top >= bottom:
        return
    # Between pixel centres: half a pixel forth in the image, half a pixel back on the canvas.
    centred = matrix[:2].copy()
    centred[:, 2] += matrix[:2, :2] @ [0.5, 0.5] - 0.5 - [left, top]
    cv2.warpAffine(
        image,
        centred,
        (right - left, bottom - top),
        dst=canvas[top:bottom, left:right],
        flags=cv2.INTER_LINEAR,
        borderMode=cv2.BORDER_TRANSPARENT,
    )


def move_boxes(boxes_xyxy: Boxes, matrix: Matrix) -> Boxes:
    """The upright boxes (n, 4) around the boxes' images under ``matrix``."""
    corners = boxes_xyxy[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 4, 2).astype(np.float64)
    moved = corners @ matrix[:2, :2].T + matrix[:2, 2]
    return np.concatenate([moved.min(axis=1), moved.max(axis=1)], axis=1).astype(np.float32)


def visible_boxes(boxes_xyxy: Boxes, size: tuple[int, int], min_visible: float) -> tuple[Boxes, NDArray[np.bool_]]:
    """Boxes (n, 4) clipped to a picture of ``size`` (height, width), and which of them (n,) still show an object.

    Such a box keeps more than ``min_visible`` of its area, ``MIN_SIDE`` pixels each way, and no extreme aspect.
    """
    height, width = size
    clipped = boxes_xyxy.clip(0, np.array([width, height, width, height], dtype=np.float32))
    full = boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]
    seen = clipped[:, 2:] - clipped[:, :2]
    shorter, longer = seen.min(axis=1), seen.max(axis=1)
    kept = (
        (shorter > MIN_SIDE) & (longer < MAX_ASPECT * shorter) & (seen.prod(axis=1) > min_visible * full.prod(axis=1))
    )
    return clipped, kept


def jitter_hsv(image: Image, augment: AugmentConfig, generator: np.random.Generator) -> None:
    """Multiplies hue, saturation and value by gains drawn around 1, in place.

    On OpenCV's 8-bit HSV by look-up tables: hue in 0..179 wraps around, the others saturate at 255, all round down.
    """
    gains = 1 + generator.uniform(-1, 1, 3) * [augment.hsv_hue, augment.hsv_saturation, augment.hsv_value]
    if (gains == 1).all():
        return
    levels = np.arange(256, dtype=np.float64)
    tables = (levels * gains[0] % 180, np.minimum(levels * gains[1], 255), np.minimum(levels * gains[2], 255))
    hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV)
    planes = [cv2.LUT(plane, table.astype(np.uint8)) for plane, table in zip(cv2.split(hsv), tables, strict=True)]
    cv2.cvtColor(cv2.merge(planes), cv2.COLOR_HSV2RGB, dst=image)
