"""Reads the images of a data set as they were annotated."""

from __future__ import annotations

import logging

import cv2
import numpy as np
from numpy.typing import NDArray

from data.annotations import Annotations
from data.config import OnError
from data.errors import DataError
from data.ram_cache import RamCache

logger = logging.getLogger(__name__)


class ImageSource:
    """The decoded images of a data set, by position, from their files or from a ``cache`` of them."""

    def __init__(self, annotations: Annotations, on_error: OnError, cache: RamCache | None = None) -> None:
        self.annotations = annotations
        self.on_error = on_error
        self.cache = cache
        self._reported: set[int] = set()

    def read(self, index: int) -> NDArray[np.uint8] | None:
        """The image (h, w, 3) in RGB, of the size that its annotations are for.

        Its pixels are taken as stored, as COCO's sizes and boxes mean them; only where the annotated size is that of
        the image turned by its EXIF tag, it is turned. An image that cannot be read so raises ``DataError``; with
        ``on_error=skip`` it is ``None``, and each process reports it once.
        """
        if self.cache is not None:
            return self.cache.read(index)
        try:
            return self._decode(index)
        except DataError as error:
            if self.on_error == OnError.stop:
                raise
            if index not in self._reported:
                self._reported.add(index)
                logger.warning("left out: %s", error)
            return None

    def _decode(self, index: int) -> NDArray[np.uint8]:
        path = self.annotations.path(index)
        height, width = self.annotations.sizes[index].tolist()
        flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
        image = cv2.imread(str(path), flags)
        if image is not None and image.shape[:2] == (width, height) and width != height:
            image = cv2.imread(str(path), flags & ~cv2.IMREAD_IGNORE_ORIENTATION)
        fix = "fix: replace the file, or set data.on_error=skip to leave such images out"
        if image is None:
            what = "is not an image that OpenCV can read" if path.is_file() else "does not exist any more"
            raise DataError(f"{path} {what}. {fix}")
        if image.shape[:2] != (height, width):
            found = f"{image.shape[1]} x {image.shape[0]}"
            raise DataError(f"{path} has {found} pixels, its annotations are for {width} x {height}. {fix}")
        return np.asarray(image, dtype=np.uint8)
