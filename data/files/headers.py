"""Read type, size and orientation of an image without decoding its pixels.

Formats: JPEG (ITU-T T.81), PNG, GIF89a, BMP, WebP (RFC 9649), TIFF 6.0, Netpbm, JPEG 2000
(ISO 15444-1), AVIF.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.files.reading import read_file

KNOWN_TYPES = "JPEG, PNG, GIF, BMP, WebP, TIFF, Netpbm, JPEG 2000, AVIF"
IMAGE_SUFFIXES = frozenset(
    ".avif .bmp .gif .jp2 .jpeg .jpg .pbm .pgm .png .pnm .ppm .tif .tiff .webp".split()
)  # in lower case; files with other suffixes are not images
MAX_PIXELS = 178_956_970  # 512 MiB of RGB: a file of a few kB can decode to more
HEAD_BYTES = 16384  # usually holds the size; a JPEG may put colour profiles and thumbnails first

_JPEG_SIZE_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_BARE_MARKERS = frozenset({0x01, *range(0xD0, 0xD8)})
_NETPBM = re.compile(rb"P[1-6](?:\s|#[^\n]*\n)+(\d{1,9})(?:\s|#[^\n]*\n)+(\d{1,9})\s")
_TIFF_WIDTH, _TIFF_HEIGHT, _TIFF_ORIENTATION = 256, 257, 274
_MIRRORED = {1: (4, 2), 8: (5, 7), 3: (2, 4), 6: (7, 5)}  # orientation: with its rows, its columns reversed
MAX_EXIF = 1 << 16  # bytes, the limit in a JPEG
_EXIF = b"Exif\0\0"
_TAG_CHUNKS = {"PNG": (8, ">I4s", b"eXIf"), "WebP": (12, "<4sI", b"EXIF")}  # first chunk, its layout, Exif chunk


class Header(NamedTuple):
    """Type and stored size of an image, in pixels, before its EXIF tag turns it."""

    kind: str
    height: int
    width: int
    end: int  # of a JPEG: where its frame header ends; the pixels follow
    orientation: int = 1  # 1 to 8 (Exif 2.32), from the EXIF tag or AVIF's boxes; 1: upright

    @property
    def changes_size(self) -> bool:
        """Whether turning the image changes its size."""
        return self.orientation > 4 and self.height != self.width

    def size(self, orientation: int) -> tuple[int, int]:
        """Height and width in pixels once the image is turned by ``orientation``."""
        return (self.width, self.height) if orientation > 4 else (self.height, self.width)


def read_header(data: bytes) -> Header | None:
    """Read the header from the first bytes of a file; ``None`` if it is unknown or incomplete.

    A PNG or WebP file may have its tag behind the pixels: pass the whole file to find it there.
    """
    try:
        header = _read_header(data)
    except (struct.error, IndexError):  # the bytes end early
        return None
    if header is None or header.kind not in _TAG_CHUNKS:
        return header
    return header._replace(orientation=_chunk_orientation(header.kind, lambda at, count: data[at : at + count]))


def read_header_of(path: str) -> tuple[Header | None, bytes]:
    """Read the header of a file; return it with the bytes read. Raises ``OSError``."""
    head = read_file(path, HEAD_BYTES)
    header = read_header(head)
    if len(head) < HEAD_BYTES:
        return header, head
    if header is None:
        head = read_file(path)
        header = read_header(head)
    elif header.kind in _TAG_CHUNKS:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            found = _chunk_orientation(header.kind, lambda at, count: os.pread(descriptor, count, at))
        finally:
            os.close(descriptor)
        header = header._replace(orientation=found)
    return header, head


def read_headers(paths: Sequence[str]) -> NDArray[np.int64]:
    """Height, width and orientation (n, 3) of files; 0 where one is missing, -1 if no image."""
    rows = np.zeros((len(paths), 3), dtype=np.int64)
    for row, path in enumerate(paths):
        try:
            header, _ = read_header_of(path)
        except (OSError, ValueError):  # ValueError: an impossible name
            continue
        rows[row] = (header.height, header.width, header.orientation) if header is not None else -1
    return rows


def is_cut_short(data: bytes, header: Header) -> bool:
    """Whether a JPEG is truncated. Decoders notice it for the other types.

    The end marker cannot occur within the pixels (T.81, B.1.1.2), but it can in a thumbnail before
    them. Cameras and tools may append data behind it.
    """
    return header.kind == "JPEG" and data.rfind(b"\xff\xd9", header.end) < 0


def _orientation(tags: dict[int, int]) -> int:
    orientation = tags.get(_TIFF_ORIENTATION, 1)
    return orientation if 1 <= orientation <= 8 else 1


def _exif_orientation(exif: bytes) -> int:
    """The orientation in Exif data; 1 (upright) where there is none."""
    with suppress(struct.error):  # damaged Exif counts as none
        return _orientation(_tiff_tags(exif.removeprefix(_EXIF)))
    return 1


def _chunk_orientation(kind: str, read: Callable[[int, int], bytes]) -> int:
    """The orientation in the Exif chunk of a PNG or WebP; ``read`` takes position and length."""
    at, layout, wanted = _TAG_CHUNKS[kind]
    while len(head := read(at, 8)) == 8:
        values = struct.unpack(layout, head)
        length, name = values if kind == "PNG" else values[::-1]
        if name == wanted:
            return _exif_orientation(read(at + 8, min(length, MAX_EXIF)))
        at += 8 + length + (4 if kind == "PNG" else length % 2)  # checksum, or padding to an even length
    return 1


def _read_header(data: bytes) -> Header | None:
    if data.startswith(b"\xff\xd8\xff"):
        return _jpeg(data)
    if data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR":
        width, height = struct.unpack_from(">II", data, 16)
        return Header("PNG", height, width, 0)
    if data.startswith((b"GIF87a", b"GIF89a")):
        width, height = struct.unpack_from("<HH", data, 6)
        return Header("GIF", height, width, 0)
    if data.startswith(b"BM"):
        return _bmp(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _webp(data)
    if data.startswith((b"II*\0", b"MM\0*")):
        tags = _tiff_tags(data)
        if _TIFF_WIDTH not in tags or _TIFF_HEIGHT not in tags:
            return None
        return Header("TIFF", tags[_TIFF_HEIGHT], tags[_TIFF_WIDTH], 0, _orientation(tags))
    if data[4:12] in (b"ftypavif", b"ftypavis"):
        header = _boxed("AVIF", data, b"mdat", b"ispe", 4)
        return header and header._replace(orientation=_avif_orientation(data))
    if data.startswith(b"\0\0\0\x0cjP  "):
        header = _boxed("JPEG 2000", data, b"jp2c", b"ihdr", 0)
        return header and header._replace(height=header.width, width=header.height)  # stored height first
    netpbm = _NETPBM.match(data)
    return Header("Netpbm", int(netpbm[2]), int(netpbm[1]), 0) if netpbm else None


def _jpeg(data: bytes) -> Header | None:
    """Skip the segments in front of the frame header, which holds the size."""
    position, orientation = 2, None
    while data[position] == 0xFF:
        marker = data[position + 1]
        if marker == 0xFF:  # a fill byte
            position += 1
        elif marker in _JPEG_BARE_MARKERS:
            position += 2
        elif marker in _JPEG_SIZE_MARKERS:
            length, _, height, width = struct.unpack_from(">HBHH", data, position + 2)
            return Header("JPEG", height, width, position + 2 + length, orientation or 1)
        else:
            (length,) = struct.unpack_from(">H", data, position + 2)
            if length < 2 or marker == 0xDA:  # pixels before any size
                return None
            content = position + 4
            if marker == 0xE1 and orientation is None and data.startswith(_EXIF, content):
                orientation = _exif_orientation(data[content : position + 2 + length])
            position += 2 + length
    return None


def _bmp(data: bytes) -> Header:
    (length,) = struct.unpack_from("<I", data, 14)
    width, height = struct.unpack_from("<HH" if length == 12 else "<ii", data, 18)
    return Header("BMP", abs(height), width, 0)  # negative: rows from top to bottom


def _webp(data: bytes) -> Header | None:
    chunk = data[12:16]
    if chunk == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        return Header("WebP", height, width, 0) if len(data) >= 30 else None
    if chunk == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return Header("WebP", (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1, 0)
    if chunk == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return Header("WebP", height & 0x3FFF, width & 0x3FFF, 0)
    return None


def _boxed(kind: str, data: bytes, pixels: bytes, tag: bytes, skip: int) -> Header | None:
    """The largest size in the boxes ``tag`` of an ISO media file; each tile may have its own."""
    head = data.partition(pixels)[0]  # compressed pixels may hold the tag by chance
    searched = head if tag in head else data
    sizes = [struct.unpack_from(">II", searched, match.end() + skip) for match in re.finditer(tag, searched)]
    if not sizes:
        return None
    width, height = max(sizes, key=lambda size: int(size[0]) * int(size[1]))
    return Header(kind, height, width, 0)


def _avif_orientation(data: bytes) -> int:
    """The orientation from AVIF's boxes: quarter turns to the left, then a mirror (HEIF, 6.5)."""
    head = data.partition(b"mdat")[0]
    turn, mirror = (re.search(box + b"(.)", head, re.DOTALL) for box in (b"irot", b"imir"))
    unmirrored = (1, 8, 3, 6)[turn[1][0] & 3 if turn else 0]
    return unmirrored if mirror is None else _MIRRORED[unmirrored][mirror[1][0] & 1]


def _tiff_tags(data: bytes) -> dict[int, int]:
    """The integers of the first directory of a TIFF file or of Exif data, by tag."""
    order = "<" if data.startswith(b"II") else ">"
    (start,) = struct.unpack_from(order + "I", data, 4)
    (count,) = struct.unpack_from(order + "H", data, start)
    tags = {}
    for entry in range(start + 2, start + 2 + 12 * count, 12):
        tag, kind, length = struct.unpack_from(order + "HHI", data, entry)
        if length == 1 and kind in (3, 4):
            (tags[tag],) = struct.unpack_from(order + ("H" if kind == 3 else "I"), data, entry + 8)
    return tags
