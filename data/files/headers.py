"""Read type, size and orientation of an image without decoding its pixels, with Pillow."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Sequence
from functools import cache
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

KINDS = {  # by Pillow's name; MPO is a JPEG with more pictures behind it
    "JPEG": "JPEG",
    "MPO": "JPEG",
    "PNG": "PNG",
    "GIF": "GIF",
    "BMP": "BMP",
    "WEBP": "WebP",
    "TIFF": "TIFF",
    "PPM": "Netpbm",
    "JPEG2000": "JPEG 2000",
    "AVIF": "AVIF",
}
KNOWN_TYPES = ", ".join(dict.fromkeys(KINDS.values()))
IMAGE_SUFFIXES = frozenset(
    ".avif .bmp .gif .jp2 .jpeg .jpg .pbm .pgm .png .pnm .ppm .tif .tiff .webp".split()
)  # in lower case; files with other suffixes are not images
MAX_PIXELS = 178_956_970  # 512 MiB of RGB, as Pillow's limit: a file of a few kB can decode to more
_TIFF_WIDTH, _TIFF_HEIGHT, _ORIENTATION = 256, 257, 274
_PNG_CHUNKS = 8  # where they begin
_MAX_EXIF = 1 << 16  # bytes, the limit in a JPEG


class Header(NamedTuple):
    """Type and stored size of an image, in pixels, before its EXIF tag turns it."""

    kind: str
    height: int
    width: int
    orientation: int = 1  # 1 to 8 (Exif 2.32), from the EXIF tag or AVIF's boxes; 1: upright

    @property
    def changes_size(self) -> bool:
        """Whether turning the image changes its size."""
        return self.orientation > 4 and self.height != self.width

    def size(self, orientation: int) -> tuple[int, int]:
        """Height and width in pixels once the image is turned by ``orientation``."""
        return (self.width, self.height) if orientation > 4 else (self.height, self.width)


class TooLargeError(ValueError):
    """An image has more than MAX_PIXELS."""


def read_header(content: bytes | BinaryIO) -> Header | None:
    """Read the header of a file's content; ``None`` if it is no image of a known type.

    Raises ``TooLargeError``.
    """
    from PIL import Image  # slow

    file = io.BytesIO(content) if isinstance(content, bytes) else content
    try:
        with Image.open(file, formats=_formats()) as image:
            kind, (width, height) = KINDS[image.format or ""], image.size
            if kind == "TIFF":  # Pillow gives the size once turned
                tags = image.tag_v2  # type: ignore[attr-defined]
                width, height, orientation = tags[_TIFF_WIDTH], tags[_TIFF_HEIGHT], tags.get(_ORIENTATION, 1)
            else:
                # Not getexif(): it decodes a PNG to find a late tag, and takes XMP for one.
                exif = Image.Exif()
                exif.load(_png_exif(file) if kind == "PNG" else image.info.get("exif", b""))
                orientation = exif.get(_ORIENTATION, 1)
    except Image.DecompressionBombError as error:
        raise TooLargeError(str(error)) from error
    except Exception:  # of a damaged file: of any kind
        return None
    return Header(kind, height, width, orientation if orientation in range(1, 9) else 1)


@cache
def _formats() -> list[str]:
    """Pillow's names of the types that this build of it reads."""
    from PIL import Image

    Image.init()
    return [name for name in KINDS if name in Image.OPEN and name != "MPO"]


def _png_exif(file: BinaryIO) -> bytes:
    """The content of a PNG's Exif chunk, which may lie behind the pixels."""
    file.seek(_PNG_CHUNKS)
    while len(head := file.read(8)) == 8:
        length, name = struct.unpack(">I4s", head)
        if name == b"eXIf":
            return b"Exif\0\0" + file.read(min(length, _MAX_EXIF))
        file.seek(length + 4, os.SEEK_CUR)  # and the checksum
    return b""


def read_header_of(path: str) -> Header | None:
    """Read the header of a file as ``read_header`` does. Raises ``OSError`` and TooLargeError."""
    with open(path, "rb", opener=_without_waiting) as file:
        return read_header(file)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # do not wait for a pipe


def read_headers(paths: Sequence[str]) -> NDArray[np.int64]:
    """Height, width and orientation (n, 3) of files; 0 where one is missing, -1 if no image."""
    rows = np.zeros((len(paths), 3), dtype=np.int64)
    for row, path in enumerate(paths):
        try:
            header = read_header_of(path)
        except TooLargeError:
            header = None
        except (OSError, ValueError):  # ValueError: an impossible name
            continue
        rows[row] = (header.height, header.width, header.orientation) if header is not None else -1
    return rows
