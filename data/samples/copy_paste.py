"""Copy objects along their outlines into another image (Ghiasi et al. 2021, Simple Copy-Paste).

The donor is drawn like any picture, with its own shift, zoom and flip. Then some of its objects
cover the sample. Boxes that they hide are dropped by the same threshold as boxes cut at an edge.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from data.geometry import Boxes, Matrix, Size, corner_points, project
from data.index.annotations import Annotations
from data.index.outlines import Outlines

FRACTION_BITS = 4  # of OpenCV's fixed-point coordinates
LARGEST = 30_000.0  # pixels from the origin: OpenCV's limit with these bits is not far above


class Paste(NamedTuple):
    """Objects pasted into a sample."""

    mask: NDArray[np.uint8]  # (H, W), 1 on the objects
    rows: NDArray[np.int64]  # (n,) rows of the data set's boxes


class ObjectChoice:
    """Choose which objects of an image are copied, and draw their mask."""

    def __init__(self, annotations: Annotations) -> None:
        # Plain views: indexing a memory map is slow.
        self._offsets = np.asarray(annotations.offsets)
        self._crowd = np.asarray(annotations.crowd)
        self._outlines = Outlines(*map(np.asarray, annotations.outlines))
        self._sizes = np.asarray(annotations.sizes)

    def paste(self, index: int, matrix: Matrix, size: Size, seed: int) -> Paste:
        """Choose each outlined object of image ``index`` with probability one half.

        ``matrix`` maps the image to the sample of ``size`` (height, width).
        """
        all_rows = np.arange(self._offsets[index], self._offsets[index + 1])
        chosen = np.random.Generator(np.random.PCG64(seed)).random(len(all_rows)) < 0.5
        mask = np.zeros(size, dtype=np.uint8)
        pasted = []
        for row in all_rows[chosen & ~self._crowd[all_rows]].tolist():
            polygons = self._outlines.of(row)
            for polygon in polygons:
                _fill(mask, polygon, matrix)
            if polygons:
                pasted.append(row)
        image = np.zeros_like(mask)  # outlines may extend beyond their image
        _fill(image, corner_points(tuple(self._sizes[index].tolist())), matrix)
        return Paste(mask & image, np.array(pasted, dtype=np.int64))


def _fill(mask: NDArray[np.uint8], polygon: NDArray[np.floating[Any]], matrix: Matrix) -> None:
    """Set the mask (H, W) to 1 inside a polygon (n, 2) mapped by ``matrix``."""
    # OpenCV's integer coordinates are pixel centres.
    corners = (project(polygon.astype(np.float64), matrix) - 0.5).clip(-LARGEST, LARGEST)
    fixed = np.round(corners * (1 << FRACTION_BITS)).astype(np.int32)
    cv2.fillPoly(mask, [fixed], 1, shift=FRACTION_BITS)


def hidden_share(boxes_xyxy: Boxes, mask: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the share (n,) of each box's pixels under the mask; boxes (n, 4) lie inside it."""
    sums = cv2.integral(mask, sdepth=cv2.CV_32S)
    left, top = np.floor(boxes_xyxy[:, :2]).astype(int).T
    right, bottom = np.ceil(boxes_xyxy[:, 2:]).astype(int).T
    inside = sums[bottom, right] - sums[top, right] - sums[bottom, left] + sums[top, left]
    return np.asarray(inside / np.maximum((right - left) * (bottom - top), 1), dtype=np.float64)
