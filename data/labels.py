"""The boxes of several images at once, moved to where a sample shows the images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from data.annotations import Annotations
from data.geometry import Boxes, Matrix, move_boxes


class Labels:
    """The boxes that training learns from, without those of crowds: these are regions, not objects.

    For one image the same as ``Annotations.training_boxes``; for the tiles of a mosaic four times as fast.
    """

    def __init__(self, annotations: Annotations) -> None:
        # Plain views of the memory maps, whose own indexing is slow.
        self._offsets = np.asarray(annotations.offsets)
        self._boxes_xywh = np.asarray(annotations.boxes_xywh)
        self._classes = np.asarray(annotations.classes)
        self._crowd = np.asarray(annotations.crowd)
        self._sizes = np.asarray(annotations.sizes)

    def moved(self, indices: Sequence[int], matrices: Sequence[Matrix]) -> tuple[NDArray[np.int32], Boxes]:
        """Classes (n,) and boxes_xyxy (n, 4) of images, each image's boxes clipped to it and moved by its matrix."""
        if not indices:
            return np.zeros(0, dtype=np.int32), np.zeros((0, 4), dtype=np.float32)
        ranges = [np.arange(self._offsets[index], self._offsets[index + 1]) for index in indices]
        rows = np.concatenate(ranges)
        image = np.repeat(np.arange(len(indices)), [len(part) for part in ranges])
        crowd = self._crowd[rows]
        if crowd.any():
            rows, image = rows[~crowd], image[~crowd]
        boxes = self._boxes_xywh[rows]
        boxes[:, 2:] += boxes[:, :2]
        limits = self._sizes[indices][:, [1, 0, 1, 0]][image]
        clipped = np.minimum(np.maximum(boxes, 0), limits).astype(np.float32)
        return self._classes[rows], move_boxes(clipped, np.stack(matrices)[image])
