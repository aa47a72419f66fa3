"""Read the images of a data set as annotated."""

from __future__ import annotations

import logging
from os import PathLike
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from data.config import OnError
from data.errors import DataError
from data.files.headers import KNOWN_TYPES, MAX_PIXELS, Header, TooLargeError, read_header
from data.files.jpeg import decode_rows, is_cut_short
from data.files.reading import read_file
from data.geometry import Image
from data.images.cache import CachedImages
from data.images.orientation import turn_decoded
from data.index.annotations import Annotations

logger = logging.getLogger(__name__)

AS_STORED = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION  # RGB; only TIFF files are turned
_FIX = "fix: replace the file, or set data.on_error=skip to leave such images out"


class Encoded(NamedTuple):
    """An image file ready to decode: complete, and of the annotated size."""

    path: str
    data: bytes
    header: Header
    orientation: int  # EXIF orientation to apply, 1 to 8; 1: leave as stored


def open_image(path: str | PathLike[str], fix: str) -> tuple[bytes, Header]:
    """Read an image file whose header names a known type and a size that is safe to decode.

    Raises ``DataError``, with ``fix`` as its way out.
    """
    try:
        data = read_file(path)
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist. {fix}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}). {fix}") from error
    try:
        header = read_header(data)
    except TooLargeError as error:
        raise DataError(f"{path} has more than the {MAX_PIXELS:,} pixels that are read. {fix}") from error
    if header is None:
        what = f"is not an image of a known type ({KNOWN_TYPES})" if data else "is empty"
        raise DataError(f"{path} {what}. {fix}")
    return data, header


def check_complete(path: str | PathLike[str], data: bytes, header: Header, fix: str) -> None:
    """Raise ``DataError`` if the file ends before its JPEG data do."""
    if header.kind == "JPEG" and is_cut_short(data):
        raise DataError(f"{path} is cut short: the end of its JPEG data is missing. {fix}")


def decode_stored(path: str | PathLike[str], data: bytes, header: Header, fix: str) -> Image:
    """Decode an image with OpenCV, not yet turned. Raises ``DataError``."""
    # OpenCV prints about broken images without naming them; the errors here name the file.
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    # From memory OpenCV refuses an image that ends early; from a file it fills up a JPEG with grey.
    encoded = np.frombuffer(data, dtype=np.uint8)
    image = cv2.imdecode(encoded, AS_STORED)
    if image is not None:
        return np.asarray(image, dtype=np.uint8)
    pixels = cv2.imdecode(encoded, cv2.IMREAD_UNCHANGED)
    if pixels is None or pixels.itemsize <= 2:
        why = f"cannot be decoded: its {header.kind} data are damaged, or of a kind that OpenCV does not read"
    else:
        why = f"has pixels of {pixels.dtype}; only images of 8 or 16 bits are read, so convert it"
    raise DataError(f"{path} {why}. {fix}")


class ImageSource:
    """The decoded images of a data set by position, from their files or a ``cache``."""

    def __init__(self, annotations: Annotations, on_error: OnError, cache: CachedImages | None = None) -> None:
        self.annotations = annotations
        self.on_error = on_error
        self.cache = cache
        self._reported: set[int] = set()

    def read(self, index: int, rows: int | None = None) -> NDArray[np.uint8] | None:
        """Return the image (h, w, 3) in RGB, in its annotated size.

        Its EXIF tag and the set's rule decide how it is turned (data/images/orientation.py). Only
        the first frame of an animation is read. Rows beyond the first ``rows`` may be missing.

        An unreadable image raises ``DataError``. With ``on_error=skip`` the result is ``None``, and
        each process warns about the image once.
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
        """Read an image's bytes and check all that needs no decoding. Raises ``DataError``."""
        path = self.annotations.path(index)
        height, width = self.annotations.sizes[index].tolist()
        data, header = open_image(path, _FIX)
        orientation = self.annotations.turn.orientation(header, (height, width))
        if header.size(orientation) != (height, width):
            raise self._wrong_size(index, header)
        check_complete(path, data, header, _FIX)
        return Encoded(path, data, header, orientation)

    def _decode(self, index: int, rows: int | None) -> NDArray[np.uint8]:
        path, data, header, orientation = self.read_encoded(index)
        if header.kind == "JPEG":
            needed = header.height if rows is None or orientation != 1 else rows
            quickly = decode_rows(data, header.height, needed)
            if quickly is not None:
                return turn_decoded(quickly, header, orientation)
        image = decode_stored(path, data, header, _FIX)
        turned = turn_decoded(image, header, orientation)
        if turned.shape[:2] != tuple(self.annotations.sizes[index].tolist()):
            raise self._wrong_size(index, header._replace(height=image.shape[0], width=image.shape[1]))
        return turned

    def _wrong_size(self, index: int, header: Header) -> DataError:
        height, width = self.annotations.sizes[index].tolist()
        found, fix = f"{header.width:,} x {header.height:,} pixels", _FIX
        if header.orientation != 1:
            shown_height, shown_width = header.size(header.orientation)
            found += f", {shown_width:,} x {shown_height:,} once turned by its EXIF tag {header.orientation}"
            if (shown_height, shown_width) == (height, width):  # as data.exif=ignore forbids
                fix = "fix: data.exif=apply"
        path, meant = self.annotations.path(index), f"its annotations are for {width:,} x {height:,}"
        return DataError(f"{path} has {found}, {meant}. {fix}")
