"""Where pictures and their boxes go, and how the pixels get there.

Coordinates are continuous: pixel i of a row covers i..i + 1, so scaling an image scales its boxes
by the same factor. To OpenCV, whole numbers are the centres of pixels.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from data.config import Resize

Image = NDArray[np.uint8]  # (h, w, 3) RGB
Floats = NDArray[np.floating[Any]]  # of any precision
Boxes = NDArray[np.float32]  # (n, 4) left, top, right, bottom in pixels
Matrix = NDArray[np.float64]  # (3, 3) maps (x, y, 1) of one picture to another; the last row is 0, 0, 1
Size = tuple[int, int]  # height, width in pixels
ImageSize = int | Sequence[int]  # as options say it: the side of a square, or height and width
Draw = Callable[[Image, Image], None]  # onto the first, the canvas, the second

MIN_SIDE = 2.0  # pixels; smaller boxes are not usable as targets
MIN_VISIBLE = 0.2  # share of a box's area that must be left after clipping
PAD_VALUE = 114  # grey of the letterbox, as in all YOLO systems
TOLERANCE = 1e-6  # pixels: a coordinate this close to a whole number counts as whole
MARGIN = 1  # source pixels that interpolation may read beyond the last one shown
PRECISION = 1 / 32  # pixels: the grid of points at which OpenCV's warps sample
FLIP_CODES = {(True, False): 0, (False, True): 1, (True, True): -1}  # vertically, horizontally, both
MAX_LONGER = 32  # pixels tried for a whole length; about one in 16 is whole to that precision


def both_sides(image_size: ImageSize) -> Size:
    """Height and width of an option ``image_size``: the side of a square, or both."""
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    return height, width


def scaled_size(image_size: Sequence[int], target: Size) -> Size:
    """Scale (height, width) by one ratio to fit ``target``."""
    height, width = image_size
    ratio = min(target[0] / height, target[1] / width)
    return max(1, round(height * ratio)), max(1, round(width * ratio))


def move_boxes(boxes_xyxy: Boxes, matrix: Matrix) -> Boxes:
    """Return upright boxes (n, 4) around boxes mapped by one matrix, or by one each (n, 3, 3)."""
    corners = boxes_xyxy[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 4, 2)
    points = corners @ matrix[..., :2, :2].swapaxes(-1, -2) + matrix[..., None, :2, 2]
    return np.hstack([points.min(axis=1), points.max(axis=1)]).astype(np.float32)


def cut_at_edges(boxes_xyxy: NDArray[Any], size: Size) -> NDArray[Any]:
    """Clip boxes (n, 4) to an image of ``size`` (height, width)."""
    height, width = size
    return boxes_xyxy.clip(0, np.array([width, height, width, height], boxes_xyxy.dtype))


def visible_boxes(boxes_xyxy: Boxes, size: Size) -> tuple[Boxes, NDArray[np.bool_]]:
    """Clip boxes (n, 4) to a picture of ``size`` (height, width); say which (n,) remain usable.

    A usable box keeps more than ``MIN_VISIBLE`` of its area, and sides above ``MIN_SIDE`` pixels.
    """
    clipped = cut_at_edges(boxes_xyxy, size)
    full = boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]
    inside = clipped[:, 2:] - clipped[:, :2]
    visible = inside.prod(axis=1) > MIN_VISIBLE * full.prod(axis=1)
    return clipped, visible & (inside > MIN_SIDE).all(axis=1)


class Letterbox(NamedTuple):
    """The scale and the shift, in pixels, from an image to its network input."""

    ratio_x: float
    ratio_y: float
    pad_x: float
    pad_y: float

    def to_network(self, boxes_xyxy: Boxes) -> Boxes:
        """Map boxes from pixels of the original image to pixels of the network input."""
        scale, shift = np.tile(self[:2], 2), np.tile(self[2:], 2)
        return np.asarray(boxes_xyxy * scale + shift, np.float32)

    def to_original(self, boxes_xyxy: Floats) -> NDArray[np.float64]:
        """Map boxes back to pixels of the original image, without clipping them."""
        scale, shift = np.tile(self[:2], 2), np.tile(self[2:], 2)
        return np.asarray((boxes_xyxy - shift) / scale)


def resize_into(canvas: Image, image: Image, resize: Resize) -> Letterbox:
    """Resize an image into the canvas.

    A letterbox scales it to fit, by area average if it shrinks and linearly if it grows, centres it
    and fills the rest with grey. Stretching is linear, as in Darknet and OpenCV. The returned
    ratios are those of the rounded size, so ``to_original`` is the exact inverse.
    """
    (height, width), target = image.shape[:2], canvas.shape[:2]
    new_height, new_width = target if resize == Resize.stretch else scaled_size((height, width), target)
    top, left = (target[0] - new_height) // 2, (target[1] - new_width) // 2
    canvas.fill(PAD_VALUE)
    shrinks = resize == Resize.letterbox and (new_height < height or new_width < width)
    interpolation = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    inner = canvas[top : top + new_height, left : left + new_width]
    cv2.resize(image, (new_width, new_height), dst=inner, interpolation=interpolation)
    return Letterbox(new_width / width, new_height / height, left, top)


class Span(NamedTuple):
    """One axis of an upright tile: which pixels of the image become which pixels of the canvas.

    Pixels ``source`` of the image are scaled by ``factor``, from the first or, with ``from_end``,
    from the last one on. Pixels ``resized`` of the result go to pixels ``shown`` of the canvas, in
    reverse order with ``reversed``.
    """

    source: slice
    from_end: bool
    factor: float
    resized: slice
    shown: slice
    reversed: bool


def tile_of(matrix: Matrix, image_size: Size, canvas_size: Size) -> tuple[int, Draw] | None:
    """How to draw an image of ``image_size`` where ``matrix`` maps it; ``None``: nothing shows.

    Returned are the number of the image's first rows that are needed, and what draws exactly these,
    touching only pixels that the canvas shows. An image that stays upright and starts at a whole
    pixel is resized. Any other is warped, which takes three to five times as long. Both interpolate
    linearly at pixel centres of the canvas, to 1/32 pixel.
    """
    if not (matrix[0, 1] or matrix[1, 0]):
        spans = []
        for axis, factor, shift in ((0, *matrix[1, 1:].tolist()), (1, *matrix[0, ::2].tolist())):
            ends = shift, shift + factor * image_size[axis]
            if max(ends) < 0.5 or min(ends) > canvas_size[axis] - 0.5:  # less than half a pixel of the canvas
                return None
            spans.append(_span(factor, shift, image_size[axis], canvas_size[axis]))
        rows, columns = spans
        if rows is not None and columns is not None:
            return rows.source.stop, partial(_draw_upright, rows, columns)
    # Two convex shapes meet unless an edge of one separates them, and in the coordinates of one the
    # bounding box of the other tests its edges.
    covered = project(corner_points(image_size), matrix)
    shown = project(corner_points(canvas_size), np.linalg.inv(matrix))
    if not _boxes_meet(covered, canvas_size) or not _boxes_meet(shown, image_size):
        return None
    return min(image_size[0], math.ceil(shown[:, 1].max()) + MARGIN), partial(_draw_warped, matrix)


def project(points: Floats, matrix: Floats) -> NDArray[np.float64]:
    """Map points (..., 2) of x, y by ``matrix``."""
    return np.asarray(points @ matrix[:2, :2].T + matrix[:2, 2])


def corner_points(size: Size) -> NDArray[np.float64]:
    """Return the corners (4, 2) of a picture of ``size``, clockwise from the top left."""
    height, width = size
    return np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float64)


def _boxes_meet(points: np.ndarray, size: Size) -> bool:
    return bool((points.max(axis=0) > 0).all() and (points.min(axis=0) < size[::-1]).all())


def _span(factor: float, shift: float, side: int, canvas_side: int) -> Span | None:
    """Return one axis of an upright tile, starting at the nearest edge on a whole pixel."""
    best = None
    least_skipped, size = math.inf, abs(factor)
    for at_end in (False, True):
        position = factor * side + shift if at_end else shift
        begin = round(position)
        grows = at_end == (factor < 0)  # whether canvas pixels count up from this edge into the image
        skipped = max(0, -begin if grows else begin - canvas_side)
        if abs(position - begin) > TOLERANCE or skipped >= least_skipped:
            continue
        room = canvas_side - begin if grows else begin
        length = min(side, math.ceil(room / size) + MARGIN)
        whole = _whole_length(length, side, size) if at_end else None
        scaled = round((whole or length) * size)  # rounded as OpenCV does, half to even
        stop = min(room, scaled)
        if stop <= skipped:
            continue
        least_skipped = skipped
        shown = slice(begin + skipped, begin + stop) if grows else slice(begin - stop, begin - skipped)
        if whole is not None:
            resized = slice(scaled - stop, scaled - skipped)
            best = Span(slice(side - whole, side), False, scaled / whole, resized, shown, factor < 0)
        else:
            source = slice(side - length, side) if at_end else slice(0, length)
            best = Span(source, at_end, size, slice(skipped, stop), shown, not grows)
    return best


def _whole_length(length: int, side: int, factor: float) -> int | None:
    """Return a number of pixels, at least ``length``, that scales to a whole one; None: not found.

    A resize from the first of these ends exactly at the image's last edge, which saves a flip.
    """
    for longer in range(length, min(side, length + MAX_LONGER) + 1):
        if abs(longer * factor - round(longer * factor)) <= PRECISION:
            return longer
    return None


def _draw_upright(rows: Span, columns: Span, canvas: Image, image: Image) -> None:
    pixels: np.ndarray = image[rows.source, columns.source]
    if rows.from_end or columns.from_end:  # a resize starts at the top left
        pixels = cv2.flip(pixels, FLIP_CODES[rows.from_end, columns.from_end])
    resized = cv2.resize(pixels, None, fx=columns.factor, fy=rows.factor, interpolation=cv2.INTER_LINEAR)
    shown = resized[rows.resized, columns.resized]
    if rows.reversed or columns.reversed:
        shown = cv2.flip(shown, FLIP_CODES[rows.reversed, columns.reversed])
    canvas[rows.shown, columns.shown] = shown


def _draw_warped(matrix: Matrix, canvas: Image, image: Image) -> None:
    """Warp an image; OpenCV 5 blends its edge pixels with the canvas, older ones leave them out."""
    corners = project(corner_points(image.shape[:2]), matrix)
    left, top = np.floor(corners.min(axis=0)).clip(0).astype(int).tolist()
    right, bottom = np.ceil(corners.max(axis=0)).clip(max=canvas.shape[1::-1]).astype(int).tolist()
    if left >= right or top >= bottom:
        return
    forth = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])
    back = np.array([[1, 0, -0.5 - left], [0, 1, -0.5 - top], [0, 0, 1]])
    shown = canvas[top:bottom, left:right]
    options = {"flags": cv2.INTER_LINEAR, "borderMode": cv2.BORDER_TRANSPARENT}
    cv2.warpAffine(image, (back @ matrix @ forth)[:2], (right - left, bottom - top), dst=shown, **options)
