"""Draw images where a matrix maps them, touching only the pixels that the canvas shows.

An image that stays upright and starts at a whole pixel of the canvas is resized. Any other is
warped, which takes three to five times as long. Both interpolate linearly at pixel centres of the
canvas, to 1/32 pixel.
"""

import math
from typing import NamedTuple

import cv2
import numpy as np

from data.geometry import Image, Matrix, Size, corner_points, is_upright, project

TOLERANCE = 1e-6  # pixels: a coordinate this close to a whole number counts as whole
MARGIN = 1  # source pixels that interpolation may read beyond the last one shown
PRECISION = 1 / 32  # pixels: the grid of points at which OpenCV's warps sample
FLIP_CODES = {(True, False): 0, (False, True): 1, (True, True): -1}  # OpenCV's: vertically, horizontally, both
MAX_LONGER = 32  # pixels tried for a whole length; about one in 16 is whole to that precision


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


class UprightTile(NamedTuple):
    """A tile that a resize can draw."""

    rows: Span
    columns: Span

    @property
    def last_row(self) -> int:
        """How many of the image's first rows are needed."""
        return int(self.rows.source.stop)

    def draw(self, canvas: Image, image: Image) -> None:
        """Draw the image, or the rows of it that are needed, onto the canvas."""
        rows, columns = self.rows, self.columns
        pixels = image[rows.source, columns.source]
        if (code := FLIP_CODES.get((rows.from_end, columns.from_end))) is not None:
            pixels = np.asarray(cv2.flip(pixels, code), dtype=np.uint8)  # a resize starts at the top left
        resized = cv2.resize(pixels, None, fx=columns.factor, fy=rows.factor, interpolation=cv2.INTER_LINEAR)
        resized = resized[rows.resized, columns.resized]
        shown = canvas[rows.shown, columns.shown]
        if (code := FLIP_CODES.get((rows.reversed, columns.reversed))) is not None:
            cv2.flip(resized, code, dst=shown)
        else:
            shown[:] = resized


class WarpedTile(NamedTuple):
    """A tile that needs a warp."""

    matrix: Matrix
    last_row: int  # how many of the image's first rows are needed

    def draw(self, canvas: Image, image: Image) -> None:
        """Draw the image, or the rows of it that are needed, onto the canvas.

        OpenCV 5 blends the image's edge pixels with the canvas; older ones leave them out.
        """
        # Other samples of the batch may need more rows, but the last bits of a warp depend on the
        # size of its source.
        image = image[: self.last_row]
        corners = project(corner_points((image.shape[0], image.shape[1])), self.matrix)
        left, top = np.maximum(np.floor(corners.min(axis=0)), 0).astype(int).tolist()
        right = min(math.ceil(corners[:, 0].max()), canvas.shape[1])
        bottom = min(math.ceil(corners[:, 1].max()), canvas.shape[0])
        if left >= right or top >= bottom:
            return
        # To OpenCV whole numbers are pixel centres: add half a pixel in the image, and subtract it
        # on this part of the canvas.
        forth = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])
        back = np.array([[1, 0, -0.5 - left], [0, 1, -0.5 - top], [0, 0, 1]])
        matrix = back @ self.matrix @ forth
        shown = canvas[top:bottom, left:right]
        options = {"flags": cv2.INTER_LINEAR, "borderMode": cv2.BORDER_TRANSPARENT}
        cv2.warpAffine(image, matrix[:2], (right - left, bottom - top), dst=shown, **options)


def tile_of(matrix: Matrix, image_size: Size, canvas_size: Size) -> UprightTile | WarpedTile | None:
    """How to draw an image of ``image_size`` where ``matrix`` maps it; ``None``: nothing shows."""
    if is_upright(matrix):
        (factor_x, _, shift_x), (_, factor_y, shift_y), _ = matrix.tolist()
        horizontal = factor_x, shift_x, image_size[1], canvas_size[1]
        vertical = factor_y, shift_y, image_size[0], canvas_size[0]
        if _misses(*horizontal) or _misses(*vertical):
            return None
        rows, columns = _span(*vertical), _span(*horizontal)
        if rows is not None and columns is not None:
            return UprightTile(rows, columns)
    # Two convex shapes meet unless an edge of one separates them, and in the coordinates of one the
    # bounding box of the other tests its edges.
    shown = project(corner_points(canvas_size), np.linalg.inv(matrix))
    if not _boxes_meet(project(corner_points(image_size), matrix), canvas_size) or not _boxes_meet(shown, image_size):
        return None
    return WarpedTile(matrix, min(image_size[0], math.ceil(shown[:, 1].max()) + MARGIN))


def _misses(factor: float, shift: float, side: int, canvas_side: int) -> bool:
    """Whether less than half a canvas pixel shows the image's range 0..side."""
    end = shift + factor * side
    return max(shift, end) < 0.5 or min(shift, end) > canvas_side - 0.5


def _span(factor: float, shift: float, side: int, canvas_side: int) -> Span | None:
    """Return one axis of an upright tile, starting at the nearest edge on a whole pixel."""
    best: Span | None = None
    least_skipped = math.inf
    for at_end in (False, True):
        position = factor * side + shift if at_end else shift
        begin = round(position)
        if abs(position - begin) > TOLERANCE:
            continue
        grows = at_end == (factor < 0)  # whether canvas pixels count up from this edge into the image
        skipped, room = max(0, -begin if grows else begin - canvas_side), canvas_side - begin if grows else begin
        if skipped >= least_skipped:
            continue
        size = abs(factor)
        length = min(side, math.ceil(room / size) + MARGIN)
        whole = _whole_length(length, side, size) if at_end else None
        scaled = round((whole or length) * size)  # rounded as OpenCV does, half to even
        stop = min(room, scaled)
        if stop > skipped:
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

    A resize from the first of these pixels then ends exactly at the image's last edge, so the image
    need not be flipped.
    """
    for longer in range(length, min(side, length + MAX_LONGER) + 1):
        if abs(longer * factor - round(longer * factor)) <= PRECISION:
            return longer
    return None


def _boxes_meet(points: np.ndarray, size: Size) -> bool:
    left, top = points.min(axis=0)
    right, bottom = points.max(axis=0)
    return bool(right > 0 and bottom > 0 and left < size[1] and top < size[0])
