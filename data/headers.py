"""Type, size and orientation of images from their headers, and which EXIF tags turn them upright.

An image is turned unless its annotated size fits only the stored pixels. Tags 2 to 4 and squares
keep their size, so it cannot decide there. Then the majority of the set's other tagged images
decides; without any, the image is turned.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Sequence
from functools import cache
from typing import BinaryIO, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from data.config import Exif
from data.files import in_chunks
from data.geometry import Image, Size
from data.source import Source

KINDS = {  # by Pillow's name
    "JPEG": "JPEG",
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
MAX_PIXELS = 178_956_970  # 512 MiB of RGB, as Pillow's limit: a file of a few kB can decode to more
_TIFF_WIDTH, _TIFF_HEIGHT, _ORIENTATION = 256, 257, 274
HEAD_BYTES = 16384  # usually holds the size; a JPEG may put colour profiles and thumbnails first
EXIF = b"Exif\0\0"
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # a JPEG's markers of frame headers (T.81, table B.1)
BARE = frozenset({0x01, *range(0xD0, 0xD8)})  # its markers without a length
_PNG_CHUNKS = 8  # where they begin
_MAX_EXIF = 1 << 16  # bytes, the limit in a JPEG
TURNED = "images turned upright by their EXIF tag"
STORED = "images with an EXIF tag that are read as stored, since their sizes are annotated so"
IGNORED = "images with an EXIF tag that data.exif=ignore passes over"
NEITHER = "images with an EXIF tag whose annotated size is neither that of the turned nor that of the stored image"

FLIPS = {2: 1, 3: -1, 4: 0, 6: 1, 7: -1, 8: 0}  # OpenCV's code, by orientation; 5 to 8 are transposed first
_INVERSE = (0, 1, 2, 3, 4, 5, 8, 7, 6)  # the orientation that undoes each one


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

    Pillow reads it. Those of JPEG files, which training reads again for each sample, take it ten
    times as long as ``read_segments``. Raises ``TooLargeError``.
    """
    head = content if isinstance(content, bytes) else content.read(HEAD_BYTES)
    if head.startswith(b"\xff\xd8\xff"):
        return _jpeg(head) or (None if isinstance(content, bytes) else _jpeg(head + content.read()))
    return _with_pillow(io.BytesIO(content) if isinstance(content, bytes) else content)


def _jpeg(data: bytes) -> Header | None:
    """The header of a JPEG; ``None`` if the data end before it."""
    segments = read_segments(data)
    if segments is None or len(data) < segments[0] + 9:
        return None
    height, width = struct.unpack_from(">HH", data, segments[0] + 5)
    if height * width > MAX_PIXELS:
        raise TooLargeError(f"{width:,} x {height:,} pixels")
    return Header("JPEG", height, width, _orientation(segments[1]))


def read_segments(data: bytes) -> tuple[int, bytes] | None:
    """Where a JPEG's frame header begins, and the Exif data before it; ``None`` without the former.

    The frame header (T.81, B.2.2): marker, length, precision, height, width, components.
    """
    position, exif = 2, b""
    try:
        while data[position] == 0xFF:
            marker = data[position + 1]
            if marker in FRAMES:
                return position, exif
            if marker == 0xFF:  # a fill byte
                position += 1
            elif marker in BARE:
                position += 2
            else:
                end = position + 2 + struct.unpack_from(">H", data, position + 2)[0]
                if marker == 0xE1 and not exif and data.startswith(EXIF, position + 4):
                    exif = data[position + 4 : end]
                position = end
    except (IndexError, struct.error):
        pass
    return None


def _orientation(exif: bytes) -> int:
    """The orientation in Exif data; 1 (upright) where there is none."""
    if not exif:
        return 1
    from PIL import Image

    tags = Image.Exif()
    try:
        tags.load(exif)
        found = tags.get(_ORIENTATION, 1)
    except Exception:  # of damaged data: of any kind
        return 1
    return found if found in range(1, 9) else 1


def _with_pillow(file: BinaryIO) -> Header | None:
    from PIL import Image  # slow

    file.seek(0)
    try:
        with Image.open(file, formats=_formats()) as image:
            kind, (width, height) = KINDS[image.format or ""], image.size
            if kind == "TIFF":  # Pillow gives the size once turned
                tags = image.tag_v2  # type: ignore[attr-defined]
                width, height, orientation = tags[_TIFF_WIDTH], tags[_TIFF_HEIGHT], tags.get(_ORIENTATION, 1)
                orientation = orientation if orientation in range(1, 9) else 1
            else:
                # Not getexif(): it decodes a PNG to find a late tag, and takes XMP for one.
                orientation = _orientation(_png_exif(file) if kind == "PNG" else image.info.get("exif", b""))
    except Image.DecompressionBombError as error:
        raise TooLargeError(str(error)) from error
    except Exception:  # of a damaged file: of any kind
        return None
    return Header(kind, height, width, orientation)


@cache
def _formats() -> list[str]:
    """Pillow's names of the types that this build of it reads."""
    from PIL import Image

    Image.init()
    return [name for name in KINDS if name in Image.OPEN and name != "JPEG"]


def _png_exif(file: BinaryIO) -> bytes:
    """The content of a PNG's Exif chunk, which may lie behind the pixels."""
    file.seek(_PNG_CHUNKS)
    while len(head := file.read(8)) == 8:
        length, name = struct.unpack(">I4s", head)
        if name == b"eXIf":
            return EXIF + file.read(min(length, _MAX_EXIF))
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


class TurnRule(NamedTuple):
    """Which images of a set are turned."""

    exif: Exif
    unclear: bool  # whether to turn images whose annotated size does not decide

    def orientation(self, header: Header, size: Size) -> int:
        """Return the EXIF orientation to apply, given the annotated ``size`` (height, width)."""
        if self.exif == Exif.ignore:
            return 1
        turned = header.size(header.orientation) == size if header.changes_size else self.unclear
        return header.orientation if turned else 1


def turn_decoded(image: Image, header: Header, orientation: int) -> Image:
    """Turn an image (h, w, 3), decoded with IGNORE_ORIENTATION, by an EXIF ``orientation``."""
    if header.kind == "TIFF":  # OpenCV always applies its tag
        orientation = 1 if orientation == header.orientation else _INVERSE[header.orientation]
    if orientation > 4:
        image = np.asarray(cv2.transpose(image), dtype=np.uint8)
    flip = FLIPS.get(orientation)
    return image if flip is None else np.asarray(cv2.flip(image, flip), dtype=np.uint8)


def rule_of(source: Source, exif: Exif) -> TurnRule:
    """Derive the rule of a set from its image headers and annotated sizes; fills ``source.notes``.

    Images without an annotated size get their size after turning.
    """
    paths = [os.path.join(source.image_root, name) for name in source.file_names]
    headers = np.concatenate([np.zeros((0, 3), dtype=np.int64), *in_chunks(read_headers, paths, "reading EXIF tags")])
    stored, tagged = headers[:, :2], headers[:, 2] > 1
    turned = np.where(headers[:, 2:] > 4, stored[:, ::-1], stored)
    fits_stored, fits_turned = ((sizes == source.sizes).all(axis=1) for sizes in (stored, turned))
    unsized = np.zeros(len(headers), dtype=bool)
    unsized[source.unsized] = True
    unclear = tagged & ((fits_stored & fits_turned) | unsized)
    says_stored, says_turned = tagged & ~unclear & fits_stored, tagged & ~unclear & fits_turned
    rule = TurnRule(exif, unclear=bool(says_turned.sum() >= says_stored.sum()))

    def note(kind: str, which: NDArray[np.bool_]) -> None:
        source.notes.add(kind, [source.file_names[row] for row in np.flatnonzero(which).tolist()])

    note(NEITHER, tagged & ~unclear & ~fits_stored & ~fits_turned)
    if exif == Exif.ignore:
        note(IGNORED, tagged)
        return rule
    note(TURNED, says_turned | (unclear & rule.unclear))
    note(STORED, says_stored | (unclear & (not rule.unclear)))
    if rule.unclear:
        source.sizes = np.where((unsized & tagged)[:, None], turned, source.sizes)
    return rule
