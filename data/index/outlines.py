"""Outlines of objects as polygons in flat arrays, for copy-paste augmentation.

An object has any number of polygons: none where its mask is unknown or, as for crowds, run-length
coded.
"""

from __future__ import annotations

import re
from array import array
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pycocotools import mask

from data.errors import shown

MIN_NUMBERS = 6  # of a polygon: x and y of three corners
# pycocotools' coding: each run is a number with 5 bits per letter, all letters but the last marked.
_RUNS = re.compile("(?:[P-o]{0,12}[0-O])+")


class Outlines(NamedTuple):
    """The polygons of M boxes, all empty where outlines were not read.

    Box i has the polygons ``first[i]:first[i + 1]``, polygon p the points
    ``starts[p]:starts[p + 1]``.
    """

    points: NDArray[np.float32]  # (P, 2) x, y in pixels of the image
    starts: NDArray[np.int64]  # (polygons + 1,) into points
    first: NDArray[np.int64]  # (M + 1,) into starts

    def of(self, box: int) -> list[NDArray[np.float32]]:
        """The polygons of a box, each (n, 2)."""
        if not len(self.first):
            return []
        rows = range(int(self.first[box]), int(self.first[box + 1]))
        return [self.points[self.starts[row] : self.starts[row + 1]] for row in rows]

    def rows(self, boxes: NDArray[np.int64]) -> Outlines:
        """The outlines of these boxes, in this order."""
        counts = np.diff(self.first)[boxes]
        polygons = flat_ranges(self.first[boxes], counts)
        lengths = np.diff(self.starts)[polygons]
        points = self.points[flat_ranges(self.starts[polygons], lengths)]
        return Outlines(points, offsets_of(lengths), offsets_of(counts))


NO_OUTLINES = Outlines(np.empty((0, 2), dtype=np.float32), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


class OutlineColumns:
    """Collect outlines object by object."""

    def __init__(self) -> None:
        self._points, self._starts, self._first = array("f"), array("q", [0]), array("q", [0])

    def add(self, segmentation: Any) -> str | None:
        """Add the ``segmentation`` of a COCO annotation, or say what is wrong with it."""
        polygons = segmentation if isinstance(segmentation, list) else []  # else a run-length mask, or nothing
        if not all(map(_is_polygon, polygons)):
            return f"has the segmentation {shown(segmentation)} instead of a list of polygons"
        for polygon in polygons:
            self._points.extend(polygon)
            self._starts.append(len(self._points) // 2)
        self._first.append(len(self._starts) - 1)
        return None

    def columns(self) -> Outlines:
        """All outlines so far."""
        return Outlines(
            np.frombuffer(self._points, dtype=np.float32).reshape(-1, 2),
            np.frombuffer(self._starts, dtype=np.int64),
            np.frombuffer(self._first, dtype=np.int64),
        )


def box_around(segmentation: Any) -> list[float] | None:
    """Left, top, width, height around a COCO ``segmentation``; ``None`` if it is malformed.

    Around polygons it is the box of their corners, as in COCO's own files; around a run-length
    mask in either coding it is that of pycocotools.
    """
    if isinstance(segmentation, list):
        if not segmentation or not all(map(_is_polygon, segmentation)):
            return None
        xs = [x for polygon in segmentation for x in polygon[::2]]
        ys = [y for polygon in segmentation for y in polygon[1::2]]
        return [float(v) for v in (min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys))]
    if not isinstance(segmentation, dict):
        return None
    size, counts = segmentation.get("size"), segmentation.get("counts")
    if not (isinstance(size, list) and len(size) == 2 and all(type(v) is int and 0 < v < 2**20 for v in size)):
        return None
    if isinstance(counts, list) and all(type(v) is int and v >= 0 for v in counts) and sum(counts) == size[0] * size[1]:
        segmentation = mask.frPyObjects(segmentation, *size)
    elif not (isinstance(counts, str) and _RUNS.fullmatch(counts)):
        return None
    return [float(v) for v in mask.toBbox(segmentation)]


def _is_polygon(value: Any) -> bool:
    if not isinstance(value, list) or len(value) < MIN_NUMBERS or len(value) % 2:
        return False
    return {*map(type, value)} <= {int, float} and max(map(abs, value)) < 1e9


def offsets_of(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where parts of these lengths (n,) begin in one array, and its end: (n + 1,)."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def flat_ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenate the ranges ``start, ..., start + count - 1`` of all pairs."""
    ends = np.cumsum(counts)
    numbers: NDArray[np.int64] = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)
    return numbers
