"""Resize images to network input without augmentation, and map boxes there and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from data.config import Resize
from data.geometry import Boxes, Image, scaled_size

PAD_VALUE = 114  # grey of the letterbox, as in all YOLO systems


class Letterbox(NamedTuple):
    """The scale and the shift, in pixels, from an image to its network input."""

    ratio_x: float
    ratio_y: float
    pad_x: float
    pad_y: float

    def to_network(self, boxes_xyxy: Boxes) -> Boxes:
        """Map boxes from pixels of the original image to pixels of the network input."""
        scale, shift = self._scale_and_shift()
        return (boxes_xyxy * scale + shift).astype(np.float32)

    def to_original(self, boxes_xyxy: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """Map boxes back to pixels of the original image, without clipping them."""
        scale, shift = self._scale_and_shift()
        return (boxes_xyxy - shift) / scale

    def _scale_and_shift(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return np.array([self.ratio_x, self.ratio_y] * 2), np.array([self.pad_x, self.pad_y] * 2, dtype=np.float64)


def letterbox_into(canvas: Image, image: Image, upscale: bool) -> Letterbox:
    """Scale an image to fit the canvas, centre it and fill the rest with grey.

    Shrinks by area average, enlarges linearly. The returned ratios are those of the rounded size,
    so ``to_original`` is the exact inverse.
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
    """Letterbox an image into a new array of ``size`` (height, width)."""
    canvas = np.empty((*size, 3), dtype=np.uint8)
    return canvas, letterbox_into(canvas, image, upscale)


def resize_into(canvas: Image, image: Image, resize: Resize, upscale: bool) -> Letterbox:
    """Resize an image into the canvas as ``resize`` says; only the letterbox uses ``upscale``."""
    if resize == Resize.letterbox:
        return letterbox_into(canvas, image, upscale)
    # Linearly, as Darknet and OpenCV feed networks.
    cv2.resize(image, (canvas.shape[1], canvas.shape[0]), dst=canvas, interpolation=cv2.INTER_LINEAR)
    return Letterbox(canvas.shape[1] / image.shape[1], canvas.shape[0] / image.shape[0], 0, 0)


def cut_at_edges(boxes_xyxy: NDArray[np.float64], size: tuple[int, int]) -> NDArray[np.float64]:
    """Clip boxes (n, 4) to an image of ``size`` (height, width)."""
    height, width = size
    return boxes_xyxy.clip(0, np.array([width, height, width, height], dtype=np.float64))
