"""Draw a training sample the plain way: data/dataset.py must agree, and be faster.

This is the path of the published systems. It decodes every image whole, scales it, pastes it on a
canvas of twice the sample's side, warps the canvas once and changes colours by look-up tables. Only
tests use it, with the same plans.
"""

from collections.abc import Callable

import cv2
import numpy as np
from numpy.typing import NDArray

from data.geometry import PAD_VALUE, Boxes, Image, Size, corner_points, move_boxes, project, visible_boxes
from data.index import Annotations
from data.plan import Picture, Plan


def reference_sample(
    plan: Plan, annotations: Annotations, read: Callable[[int], Image | None]
) -> tuple[Image, NDArray[np.int32], Boxes]:
    """Draw a plan: the image (H, W, 3), and the visible classes (n,) and boxes_xyxy (n, 4).

    ``read`` returns the whole image at a position of the data set, or ``None`` to leave it out.
    """
    drawn = [_picture(picture, plan.size, read) for picture in plan.pictures]
    image = drawn[0]
    if len(drawn) == 2:
        image = np.asarray(cv2.addWeighted(drawn[0], plan.share, drawn[1], 1 - plan.share, 0), dtype=np.uint8)
    found = [_boxes(picture, plan.size, annotations) for picture in plan.pictures]
    classes, boxes = (np.concatenate(column) for column in zip(*found, strict=True))
    return _change_colour(image, plan.gains), classes, boxes


def _picture(picture: Picture, size: Size, read: Callable[[int], Image | None]) -> Image:
    left, top, right, bottom = _canvas(picture, size)
    canvas = np.full((bottom - top, right - left, 3), PAD_VALUE, dtype=np.uint8)
    for placed in picture.placed:
        image = read(placed.position)
        if image is None:
            continue
        height, width = placed.scaled
        if (height, width) != image.shape[:2]:
            image = np.asarray(cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR), dtype=np.uint8)
        x, y = placed.corner[0] - left, placed.corner[1] - top
        shown = canvas[max(0, y) : max(0, y + height), max(0, x) : max(0, x + width)]
        shown[:] = image[max(0, -y) :, max(0, -x) :][: shown.shape[0], : shown.shape[1]]
    # The array's origin is the canvas's corner, and OpenCV's integer coordinates are pixel centres.
    forth = np.array([[1, 0, left + 0.5], [0, 1, top + 0.5], [0, 0, 1]])
    back = np.array([[1, 0, -0.5], [0, 1, -0.5], [0, 0, 1]])
    matrix = back @ picture.canvas_to_sample @ forth
    dsize, grey = (size[1], size[0]), (PAD_VALUE, PAD_VALUE, PAD_VALUE)
    flat = not (matrix[2, 0] or matrix[2, 1])
    warp, matrix = (cv2.warpAffine, matrix[:2]) if flat else (cv2.warpPerspective, matrix)
    return np.asarray(warp(canvas, matrix, dsize, flags=cv2.INTER_LINEAR, borderValue=grey), dtype=np.uint8)


def _canvas(picture: Picture, size: Size) -> tuple[int, int, int, int]:
    """Return left, top, right, bottom of a canvas around the sample, at least twice its sides."""
    shown = project(corner_points(size), np.linalg.inv(picture.canvas_to_sample))
    low, high = np.floor(shown.min(axis=0)).astype(int), np.ceil(shown.max(axis=0)).astype(int)
    more = np.maximum(0, 2 * np.array([size[1], size[0]]) - (high - low))
    low -= more // 2
    high += more - more // 2
    return int(low[0]), int(low[1]), int(high[0]), int(high[1])


def _change_colour(image: Image, gains: NDArray[np.float64]) -> Image:
    hue, saturation, value = cv2.split(cv2.cvtColor(image, cv2.COLOR_RGB2HSV))
    levels = np.arange(256)
    hue = cv2.LUT(hue, (levels * gains[0] % 180).astype(np.uint8))
    saturation = cv2.LUT(saturation, np.minimum(levels * gains[1], 255).astype(np.uint8))
    value = cv2.LUT(value, np.minimum(levels * gains[2], 255).astype(np.uint8))
    return np.asarray(cv2.cvtColor(cv2.merge((hue, saturation, value)), cv2.COLOR_HSV2RGB), dtype=np.uint8)


def _boxes(picture: Picture, size: Size, annotations: Annotations) -> tuple[NDArray[np.int32], Boxes]:
    """Scale, paste and warp the boxes like their images."""
    classes, boxes = [], []
    for placed in picture.placed:
        image_classes, image_boxes = annotations.training_boxes(placed.position)
        factors = np.array([placed.scaled[1] / placed.size[1], placed.scaled[0] / placed.size[0]] * 2)
        classes.append(image_classes)
        boxes.append((image_boxes * factors + np.array([*placed.corner, *placed.corner])).astype(np.float32))
    moved = move_boxes(np.concatenate(boxes), picture.canvas_to_sample)
    clipped, kept = visible_boxes(moved, size)
    return np.concatenate(classes)[kept], clipped[kept]
