"""Type, size and orientation of images from their headers, and which EXIF tags turn them upright.

An image is turned unless its annotated size fits only the stored pixels. Tags 2 to 4 and squares
keep their size, so it cannot decide there. Then the majority of the set's other tagged images
decides; without any, the image is turned.
"""

import io
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

import cv2
import numpy as np
import PIL.Image

from data.annotations_read import Source
from data.config import Exif
from data.geometry import Image, Size
from data.io import in_chunks
from data.layouts import read_file

KINDS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "JPEG2000", "AVIF")  # as Pillow calls them
KNOWN_TYPES = ", ".join(KINDS)
MAX_PIXELS = 178_956_970  # 512 MiB of RGB, Pillow's limit: a file of a few kB can decode to more
TooLargeError = PIL.Image.DecompressionBombError  # for an image of more than MAX_PIXELS
HEAD_BYTES = 16384  # usually holds the size; a JPEG may put colour profiles and thumbnails first
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # a JPEG's markers of frame headers (T.81, table B.1)
BARE = frozenset({0x01, *range(0xD0, 0xD8)})  # its markers without a length
ORIENTATION = 274  # the EXIF tag
FLIPS = {2: 1, 3: -1, 4: 0, 6: 1, 7: -1, 8: 0}  # OpenCV's code, by orientation; 5 to 8 are transposed first
TURNED = "images turned upright by their EXIF tag"
STORED = "images with an EXIF tag that are read as stored, since their sizes are annotated so"


class Header(NamedTuple):
    """Type and stored size of an image, in pixels, before its EXIF tag turns it."""

    kind: str
    height: int
    width: int
    orientation: int = 1  # 1 to 8 (Exif 2.32); 1: upright, as any TIFF, which Pillow and OpenCV turn

    def size(self, orientation: int) -> tuple[int, int]:
        """Height and width in pixels once the image is turned by ``orientation``."""
        return (self.width, self.height) if orientation > 4 else (self.height, self.width)


def read_header(source: bytes | str) -> Header | None:
    """The header of a file's content or path; ``None`` if it is no image of a known type.

    Pillow reads it. Those of JPEG files, which training reads again for each sample, take it ten
    times as long as ``read_segments``. Raises ``OSError`` and ``TooLargeError``.
    """
    data = source if isinstance(source, bytes) else read_file(source, HEAD_BYTES)
    if not data.startswith(b"\xff\xd8\xff"):
        return _with_pillow(io.BytesIO(source) if isinstance(source, bytes) else source) if data else None
    segments = read_segments(data)
    if segments is None and isinstance(source, str):
        data = read_file(source)
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
                if marker == 0xE1 and not exif and data.startswith(b"Exif\0\0", position + 4):
                    exif = data[position + 4 : end]
                position = end
    except (IndexError, struct.error):
        pass
    return None


def _with_pillow(file: io.BytesIO | str) -> Header | None:
    try:
        with PIL.Image.open(file, formats=KINDS) as image:
            return Header(str(image.format), image.height, image.width, orientation_of(image))
    except TooLargeError:
        raise
    except Exception:  # of a damaged file: of any kind
        return None


def orientation_of(image: PIL.Image.Image) -> int:
    """The EXIF orientation, 1 to 8, of an image that Pillow opened; 1 (upright) if it has none."""
    # Not getexif(): it decodes a PNG to find a late tag, and takes XMP for one.
    return 1 if image.format == "TIFF" else _orientation(image.info.get("exif", b""))


def _orientation(exif: bytes) -> int:
    """The orientation in Exif data; 1 (upright) where there is none."""
    if not exif:
        return 1
    tags = PIL.Image.Exif()
    try:
        tags.load(exif)
        orientation = tags.get(ORIENTATION, 1)
    except Exception:  # of damaged data: of any kind
        return 1
    return orientation if orientation in range(1, 9) else 1


class TurnRule(NamedTuple):
    """Which images of a set are turned."""

    exif: Exif
    unclear: bool  # whether to turn images whose annotated size does not decide

    def orientation(self, header: Header, size: Size) -> int:
        """Return the EXIF orientation to apply, given the annotated ``size`` (height, width)."""
        if self.exif == Exif.ignore:
            return 1
        changes_size = header.orientation > 4 and header.height != header.width
        turned = header.size(header.orientation) == size if changes_size else self.unclear
        return header.orientation if turned else 1


def turn_decoded(image: Image, orientation: int) -> Image:
    """Turn an image (h, w, 3), decoded with IGNORE_ORIENTATION, by an EXIF ``orientation``."""
    if orientation > 4:
        image = np.asarray(cv2.transpose(image), dtype=np.uint8)
    flip = FLIPS.get(orientation)
    return image if flip is None else np.asarray(cv2.flip(image, flip), dtype=np.uint8)


def rule_of(source: Source, exif: Exif) -> TurnRule:
    """The rule of a set, by its image headers and annotated sizes; fills ``source.notes``."""
    if exif == Exif.ignore:
        return TurnRule(exif, unclear=False)
    paths = [os.path.join(source.image_root, name) for name in source.file_names]
    headers = np.concatenate([np.zeros((0, 3), dtype=np.int64), *in_chunks(_read_rows, paths, "reading EXIF tags")])
    stored, tagged = headers[:, :2], headers[:, 2] > 1
    turned = np.where(headers[:, 2:] > 4, stored[:, ::-1], stored)
    fits_stored, fits_turned = (tagged & (sizes == source.sizes).all(axis=1) for sizes in (stored, turned))
    rule = TurnRule(exif, unclear=bool((fits_turned & ~fits_stored).sum() >= (fits_stored & ~fits_turned).sum()))
    are_turned = fits_turned & (rule.unclear | ~fits_stored)
    for kind, which in ((TURNED, are_turned), (STORED, fits_stored & ~are_turned)):
        source.notes.add(kind, [source.file_names[row] for row in np.flatnonzero(which).tolist()])
    return rule


def _read_rows(paths: Sequence[str]) -> np.typing.NDArray[np.int64]:
    """Height, width and orientation (n, 3) of files; 0 where one is missing or no image."""
    rows = np.zeros((len(paths), 3), dtype=np.int64)
    for row, path in enumerate(paths):
        try:
            header = read_header(path)
        except (OSError, ValueError, TooLargeError):  # ValueError: an impossible name
            continue
        if header is not None:
            rows[row] = header[1:]
    return rows
