"""Type, size and orientation of images from their headers, and which EXIF tags turn them upright.

An image is turned unless its annotated size fits only the stored pixels. Where turning keeps the
size, the majority of the set's other tagged images decides; without any, it is turned.
"""

import io
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import cv2
import numpy as np
import PIL.Image

from data.config import Exif
from data.geometry import Image, Size
from data.io import Int64, Source, in_chunks
from data.layouts import read_file
from data.remote import FEW, is_remote

PILLOW_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "JPEG2000", "AVIF")
KNOWN_TYPES = ", ".join(PILLOW_FORMATS)  # for messages
MAX_PIXELS = 178_956_970  # 512 MiB of RGB, Pillow's limit: a file of a few kB can decode to more
TooLargeError = PIL.Image.DecompressionBombError  # for an image of more than MAX_PIXELS
HEAD_BYTES = 16384  # usually contain the size; a JPEG may put colour profiles and thumbnails first
FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # of frame headers (T.81, table B.1)
BARE_MARKERS = frozenset({0x01, *range(0xD0, 0xD8)})  # without a length
ORIENTATION_TAG = 274  # of EXIF
FLIPS = {2: 1, 3: -1, 4: 0, 6: 1, 7: -1, 8: 0}  # OpenCV's code by orientation; 5 to 8 are transposed first
TURNED = "images turned upright by their EXIF tag"
SWAPPED = "images with boxes that are upright as their EXIF tag says, and width and height that are not"
STORED = "images with an EXIF tag that are read as stored, since their sizes are annotated so"
SEVERAL = "images of several frames or pages, of which the first is read"
MAY_HAVE_FRAMES = (".avif", ".gif", ".tif", ".tiff", ".webp")


class Header(NamedTuple):
    """Type and stored size of an image, in pixels, before its EXIF tag turns it."""

    kind: str
    height: int
    width: int
    orientation: int = 1  # 1 to 8 (Exif 2.32); 1: upright, or a TIFF, which Pillow and OpenCV turn

    def size(self, orientation: int) -> tuple[int, int]:
        """Height and width in pixels of the image turned by ``orientation``."""
        return (self.width, self.height) if orientation > 4 else (self.height, self.width)


def read_header(source: bytes | str) -> Header | None:
    """The header of a file, by content or path; ``None`` if it is not an image of a known type.

    ``read_segments`` reads JPEG files ten times as fast as Pillow. Raises OSError, TooLargeError.
    """
    data = source if isinstance(source, bytes) else read_file(source, HEAD_BYTES)
    if not data:
        return None
    if not data.startswith(b"\xff\xd8\xff"):
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        try:
            with PIL.Image.open(file, formats=PILLOW_FORMATS) as image:
                return Header(str(image.format), image.height, image.width, orientation_of(image))
        except TooLargeError:
            raise
        except Exception:  # a damaged file may raise any kind
            return None
    segments = read_segments(data)
    if segments is None and isinstance(source, str):
        data = read_file(source)
        segments = read_segments(data)
    if segments is None or len(data) < segments[0] + 9:
        return None
    height, width = struct.unpack_from(">HH", data, segments[0] + 5)
    if height * width > MAX_PIXELS:
        raise TooLargeError(f"{width:,} x {height:,} pixels")
    return Header("JPEG", height, width, _orientation(segments[1]) if segments[1] else 1)


def has_frames(path: str) -> bool:
    """Whether a file on a disk has several frames or pages."""
    with suppress(Exception):  # a damaged file may raise any kind
        if path.lower().endswith(MAY_HAVE_FRAMES):
            with PIL.Image.open(path, formats=PILLOW_FORMATS) as image:
                return getattr(image, "n_frames", 1) > 1
    return False


def header_of(path: str) -> Header | None:
    """The header of a file; ``None`` if it has none, cannot be read or is too large."""
    with suppress(OSError, ValueError, TooLargeError):  # ValueError: an impossible name
        return read_header(path)
    return None


def read_segments(data: bytes) -> tuple[int, bytes] | None:
    """Where a JPEG's frame header begins, and the Exif data before it; ``None``: it has no header.

    A frame header (T.81, B.2.2) has marker, length, precision, height, width, components.
    """
    position, exif = 2, b""
    try:
        while data[position] == 0xFF:
            marker = data[position + 1]
            if marker in FRAME_MARKERS:
                return position, exif
            if marker == 0xFF:  # a fill byte
                position += 1
            elif marker in BARE_MARKERS:
                position += 2
            else:
                end = position + 2 + struct.unpack_from(">H", data, position + 2)[0]
                if marker == 0xE1 and not exif and data.startswith(b"Exif\0\0", position + 4):
                    exif = data[position + 4 : end]
                position = end
    except (IndexError, struct.error):
        pass
    return None


def orientation_of(image: PIL.Image.Image) -> int:
    """The EXIF orientation, 1 to 8, of an image that Pillow opened; 1 (upright) if it has none."""
    # Not getexif(): it decodes a PNG to find a late tag, and also reads XMP.
    return 1 if image.format == "TIFF" else _orientation(image.info.get("exif", b""))


def _orientation(exif: bytes) -> int:
    with suppress(Exception):  # damaged data may raise any kind
        tags = PIL.Image.Exif()
        tags.load(exif)
        if tags.get(ORIENTATION_TAG) in range(1, 9):
            return int(tags[ORIENTATION_TAG])
    return 1


class TurnRule(NamedTuple):
    """Which images of a set are turned."""

    exif: Exif
    unclear: bool  # whether to turn images whose annotated size cannot decide

    def orientation(self, header: Header, size: Size) -> int:
        """Return the EXIF orientation to apply if the annotated ``size`` is (height, width)."""
        if self.exif == Exif.ignore:
            return 1
        changes_size = header.orientation > 4 and header.height != header.width
        turned = header.size(header.orientation) == size if changes_size else self.unclear
        return header.orientation if turned else 1


def turn_decoded(image: Image, orientation: int) -> Image:
    """Turn an image (h, w, 3), decoded with IGNORE_ORIENTATION, by an EXIF ``orientation``."""
    if orientation > 4:
        image = np.asarray(cv2.transpose(image), np.uint8)
    flip = FLIPS.get(orientation)
    return image if flip is None else np.asarray(cv2.flip(image, flip), np.uint8)


def add_sizes(source: Source) -> None:
    """Give images without a size that of their file on a disk."""
    rows = np.flatnonzero((source.sizes <= 0).any(axis=1) & (not is_remote(source.image_root)))
    found = _read_headers(source, rows, "reading sizes")
    source.sizes[rows] = found[:, :2]  # 0: for the checks to report
    kind = "images without an annotated size, which have that of their file"
    source.notes.add(kind, rows[found[:, 0] > 0], describe=source.file_names.__getitem__)


def rule_of(source: Source, exif: Exif) -> TurnRule:
    """Derive the rule of a set from image headers and annotated sizes; fills ``source.notes``.

    Of images at an address FEW are read.
    """
    if exif == Exif.ignore:
        return TurnRule(exif, unclear=False)
    count = len(source.file_names)
    rows = np.arange(0, count, max(1, count // FEW) if is_remote(source.image_root) else 1)
    sizes, headers = source.sizes[rows], _read_headers(source, rows, "reading EXIF tags")
    stored, tagged = headers[:, :2], headers[:, 2] > 1
    turned = np.where(headers[:, 2:] > 4, stored[:, ::-1], stored)
    fits_stored, fits_turned = (tagged & (each == sizes).all(axis=1) for each in (stored, turned))
    mixed = np.flatnonzero(fits_stored & ~fits_turned) if len(rows) == count else rows[:0]
    if _are_boxes_upright(source, mixed):  # as Label Studio exports COCO jsons
        source.notes.add(SWAPPED, mixed, describe=source.file_names.__getitem__)
        source.sizes[mixed] = turned[mixed]
        fits_stored[mixed], fits_turned[mixed] = False, True
    most_turned = (fits_turned & ~fits_stored).sum() >= (fits_stored & ~fits_turned).sum()
    rule = TurnRule(exif, unclear=bool(most_turned))
    are_turned = fits_turned & (rule.unclear | ~fits_stored)
    of_some = f", of {len(rows):,} that were read" if len(rows) < count else ""
    for kind, which in ((TURNED, are_turned), (STORED, fits_stored & ~are_turned)):
        source.notes.add(kind + of_some, rows[which], describe=source.file_names.__getitem__)
    return rule


def _are_boxes_upright(source: Source, images: Int64) -> bool:
    """Whether more boxes of ``images`` fit only into swapped sides than only into given ones."""
    images = images[np.argsort(source.image_ids[images])]
    ids = source.image_ids[images]
    boxes = np.flatnonzero(np.isin(source.box_image_ids, ids))
    height, width = source.sizes[images[np.searchsorted(ids, source.box_image_ids[boxes])]].T
    right, bottom = (source.boxes_xywh[boxes, :2] + source.boxes_xywh[boxes, 2:]).T - 1  # rounding
    fits, fits_swapped = (right <= width) & (bottom <= height), (right <= height) & (bottom <= width)
    return bool((fits_swapped & ~fits).sum() > (fits & ~fits_swapped).sum())


def _read_headers(source: Source, rows: Int64, title: str) -> Int64:
    """Height, width and orientation (n, 3) of the images in ``rows``; 0 for files that are none."""
    paths = [os.path.join(source.image_root, source.file_names[row]) for row in rows.tolist()]
    parts = in_chunks(_read_rows, paths, title, source.image_root)
    return np.concatenate([np.zeros((0, 3), np.int64), *parts])


def _read_rows(paths: Sequence[str]) -> Int64:
    rows = np.zeros((len(paths), 3), np.int64)
    for row, path in enumerate(paths):
        if header := header_of(path):
            rows[row] = header[1:]
    return rows
