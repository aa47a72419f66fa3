"""Map the boxes of many images into their samples at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from data.geometry import Boxes, Matrix, move_boxes
from data.index.annotations import Annotations


class Labels:
    """The boxes that training learns from; crowds are regions, not objects, and are left out.

    One image gives the same as ``Annotations.training_boxes``. All tiles of a batch take hardly
    longer than one.
    """

    def __init__(self, annotations: Annotations) -> None:
        # Plain views: indexing a memory map is slow.
        self._offsets = np.asarray(annotations.offsets)
        self._boxes_xywh = np.asarray(annotations.boxes_xywh)
        self._classes = np.asarray(annotations.classes)
        self._crowd = np.asarray(annotations.crowd)
        self._sizes = np.asarray(annotations.sizes)

    def moved(
        self, indices: Sequence[int], matrices: Sequence[Matrix]
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], Boxes]:
        """Clip the boxes of each image to it and map them by the image's matrix.

        Returns the position in ``indices`` (n,), the class (n,) and boxes_xyxy (n, 4) of each box.
        """
        images = np.asarray(indices, dtype=np.int64)
        starts, counts = self._offsets[images], self._offsets[images + 1] - self._offsets[images]
        numbers = np.repeat(np.arange(len(images)), counts)
        rows = np.arange(len(numbers)) + np.repeat(starts - np.cumsum(counts) + counts, counts)
        objects = ~self._crowd[rows]
        numbers, rows = numbers[objects], rows[objects]
        boxes = self._boxes_xywh[rows]
        boxes[:, 2:] += boxes[:, :2]
        limits = self._sizes[images][:, [1, 0, 1, 0]][numbers]
        clipped = np.clip(boxes, 0, limits).astype(np.float32)
        moved = move_boxes(clipped, np.asarray(matrices, dtype=np.float64).reshape(-1, 3, 3)[numbers])
        return numbers, self._classes[rows], moved
