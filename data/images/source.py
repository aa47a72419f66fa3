"""Reads the images of a data set as they were annotated."""

from __future__ import annotations

import logging
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from data.config import OnError
from data.errors import DataError
from data.files.headers import KNOWN_TYPES, MAX_PIXELS, Header, is_cut_short, read_header
from data.files.jpeg import decode_rows
from data.files.reading import read_file
from data.images.cache import CachedImages
from data.images.orientation import turn_decoded
from data.index.annotations import Annotations

logger = logging.getLogger(__name__)

AS_STORED = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION  # of cv2.imread: RGB, not turned but for TIFF files
_FIX = "fix: replace the file, or set data.on_error=skip to leave such images out"

# What OpenCV prints about a broken image does not name it; the errors here do.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)


class WrongSize(DataError):
    """An image has another size than its annotations are for."""


class Encoded(NamedTuple):
    """An image file that may be decoded: whole, and of the size that its annotations are for."""

    data: bytes
    header: Header
    orientation: int  # by which it is to be turned, 1 to 8; 1: not at all


def why_not_decoded(data: bytes, header: Header) -> str:
    """A clause on an image that does not decode: its kind of numbers, if they are others than 8 or 16 bits."""
    pixels = cv2.imdecode(np.frombuffer(data, dtype=np.uint8), cv2.IMREAD_UNCHANGED)
    if pixels is None or pixels.itemsize <= 2:
        return f"cannot be decoded: its {header.kind} data are damaged, or of a kind that OpenCV does not read"
    return f"has pixels of {pixels.dtype}; pictures of 8 or 16 bits are read, so convert it"


class ImageSource:
    """The decoded images of a data set, by position, from their files or from a ``cache`` of them."""

    def __init__(self, annotations: Annotations, on_error: OnError, cache: CachedImages | None = None) -> None:
        self.annotations = annotations
        self.on_error = on_error
        self.cache = cache
        self._reported: set[int] = set()

    def read(self, index: int, rows: int | None = None) -> NDArray[np.uint8] | None:
        """The image (h, w, 3) in RGB, of the size that its annotations are for.

        It is turned upright as its EXIF tag and the rule of the set say (images/orientation.py). Of several frames the
        first is taken. An image that cannot be read so raises ``DataError``; with ``on_error=skip`` it is ``None``, and
        each process reports it once.
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
        orientation = self.annotations.turn.orientation(header, (height, width))
        if header.size(orientation) != (height, width):
            raise self._wrong_size(index, header)
        if is_cut_short(data, header):
            raise DataError(f"{path} is cut short: the end of its JPEG data is missing. {_FIX}")
        return Encoded(data, header, orientation)

    def _decode(self, index: int, rows: int | None) -> NDArray[np.uint8]:
        return self.decode(index, self.read_encoded(index), rows)

    def decode(self, index: int, encoded: Encoded, rows: int | None = None) -> NDArray[np.uint8]:
        """The pixels of what ``read_encoded`` gave, as ``read`` returns them; raises ``DataError``."""
        data, header, orientation = encoded
        if header.kind == "JPEG":
            needed = header.height if rows is None or orientation != 1 else rows
            quickly = decode_rows(data, header.end, header.height, needed)
            if quickly is not None:
                return turn_decoded(quickly, header, orientation)
        # From memory OpenCV refuses an image that ends early; from a file it would fill up a JPEG with grey.
        image = cv2.imdecode(np.frombuffer(data, dtype=np.uint8), AS_STORED)
        if image is None:
            raise DataError(f"{self.annotations.path(index)} {why_not_decoded(data, header)}. {_FIX}")
        turned = turn_decoded(np.asarray(image, dtype=np.uint8), header, orientation)
        if turned.shape[:2] != tuple(self.annotations.sizes[index].tolist()):
            raise self._wrong_size(index, header._replace(height=image.shape[0], width=image.shape[1]))
        return turned

    def _wrong_size(self, index: int, header: Header) -> WrongSize:
        height, width = self.annotations.sizes[index].tolist()
        found, fix = f"{header.width:,} x {header.height:,} pixels", _FIX
        if header.orientation != 1:
            shown_height, shown_width = header.size(header.orientation)
            found += f", {shown_width:,} x {shown_height:,} once it is turned as its EXIF tag {header.orientation} says"
            if (shown_height, shown_width) == (height, width):  # as data.exif=ignore forbids
                fix = "fix: data.exif=apply"
        path, meant = self.annotations.path(index), f"its annotations are for {width:,} x {height:,}"
        return WrongSize(f"{path} has {found}, {meant}. {fix}")
