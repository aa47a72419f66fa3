"""Reads the images of a data set as they were annotated."""

from __future__ import annotations

import logging
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from data.annotations import Annotations
from data.config import OnError
from data.errors import DataError
from data.headers import KNOWN_TYPES, MAX_PIXELS, is_cut_short, read_header
from data.image_cache import CachedImages
from data.jpeg import decode_rows
from data.parallel import read_file

logger = logging.getLogger(__name__)

AS_STORED = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION  # of cv2.imread: RGB, not turned by EXIF tags
_FIX = "fix: replace the file, or set data.on_error=skip to leave such images out"

# What OpenCV prints about a broken image does not name it; the errors here do.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)


class Encoded(NamedTuple):
    """An image file that may be decoded: whole, and of the size that its annotations are for."""

    data: bytes
    kind: str  # such as "JPEG"; see data/headers.py
    turned: bool  # its EXIF tag is to be followed, since the annotated size is that of the turned image
    frame_end: int  # of a JPEG; see data/jpeg.py


class ImageSource:
    """The decoded images of a data set, by position, from their files or from a ``cache`` of them."""

    def __init__(self, annotations: Annotations, on_error: OnError, cache: CachedImages | None = None) -> None:
        self.annotations = annotations
        self.on_error = on_error
        self.cache = cache
        self._reported: set[int] = set()

    def read(self, index: int, rows: int | None = None) -> NDArray[np.uint8] | None:
        """The image (h, w, 3) in RGB, of the size that its annotations are for.

        Its pixels are taken as stored, as COCO's sizes and boxes mean them; only where the annotated size is that of
        the image turned by its EXIF tag, it is turned. Of several frames the first is taken. An image that cannot be
        read so raises ``DataError``; with ``on_error=skip`` it is ``None``, and each process reports it once.
        Where only the first ``rows`` rows are needed, the others may be missing.
        """
        if self.cache is not None:
            return self.cache.read(index)
        try:
            return self._decode(index, rows)
        except DataError as error:
            if self.on_error != OnError.skip:
                raise
            if index not in self._reported:
                self._reported.add(index)
                logger.warning("left out: %s", error)
            return None

    def read_encoded(self, index: int) -> Encoded:
        """The bytes of an image, checked as far as they can be without decoding; raises ``DataError``."""
        path = self.annotations.path(index)
        height, width = self.annotations.sizes[index].tolist()
        try:
            data = read_file(path)
        except FileNotFoundError as error:
            raise DataError(f"{path} does not exist any more. {_FIX}") from error
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}). {_FIX}") from error
        header = read_header(data)
        if header is None:
            what = f"is not an image of a known type ({KNOWN_TYPES})" if data else "is empty"
            raise DataError(f"{path} {what}. {_FIX}")
        if header.height * header.width > MAX_PIXELS:
            size = f"{header.width:,} x {header.height:,} pixels"
            raise DataError(f"{path} has {size}, more than the {MAX_PIXELS:,} that are read. {_FIX}")
        turned = width != height and (header.height, header.width) == (width, height)
        if not turned and (header.height, header.width) != (height, width):
            raise self._wrong_size(index, header.height, header.width)
        if is_cut_short(data, header):
            raise DataError(f"{path} is cut short: the end of its JPEG data is missing. {_FIX}")
        return Encoded(data, header.kind, turned, header.end)

    def _decode(self, index: int, rows: int | None) -> NDArray[np.uint8]:
        return self.decode(index, self.read_encoded(index), rows)

    def decode(self, index: int, encoded: Encoded, rows: int | None = None) -> NDArray[np.uint8]:
        """The pixels of what ``read_encoded`` gave, as ``read`` returns them; raises ``DataError``."""
        height, width = self.annotations.sizes[index].tolist()
        if encoded.kind == "JPEG" and not encoded.turned:
            quickly = decode_rows(encoded.data, encoded.frame_end, height, height if rows is None else rows)
            if quickly is not None:
                return quickly
        flags = AS_STORED & ~cv2.IMREAD_IGNORE_ORIENTATION if encoded.turned else AS_STORED
        # From memory OpenCV refuses an image that ends early; from a file it would fill up a JPEG with grey.
        image = cv2.imdecode(np.frombuffer(encoded.data, dtype=np.uint8), flags)
        if image is None:
            what = f"cannot be decoded: its {encoded.kind} data are damaged, or of a kind that OpenCV does not read"
            raise DataError(f"{self.annotations.path(index)} {what}. {_FIX}")
        if image.shape[:2] != (height, width):
            raise self._wrong_size(index, *image.shape[:2])
        return np.asarray(image, dtype=np.uint8)

    def _wrong_size(self, index: int, height: int, width: int) -> DataError:
        meant_height, meant_width = self.annotations.sizes[index].tolist()
        meant = f"its annotations are for {meant_width:,} x {meant_height:,}"
        return DataError(f"{self.annotations.path(index)} has {width:,} x {height:,} pixels, {meant}. {_FIX}")
