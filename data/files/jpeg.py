"""Decodes a JPEG no further down than is needed, with simplejpeg, where the extra ``fast`` is installed.

Entropy coding forbids to begin anywhere but at the top, but not to stop early: with a smaller height in the frame
header, a decoder stops after so many rows. OpenCV would do so too, with a line on stderr for each image.
"""

from __future__ import annotations

import struct

import numpy as np

from data.geometry import Image

try:
    import simplejpeg
except ImportError:
    simplejpeg = None  # the extra is not installed

HUFFMAN_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended and progressive (T.81, table B.1)
CHROMA_ROWS = 2  # where colours have half the rows, the upsampling of one looks at the next pair of rows


def decode_rows(data: bytes, frame_end: int, height: int, rows: int) -> Image | None:
    """The first ``rows`` rows or a few more of a JPEG of ``height`` rows, RGB, the very pixels that OpenCV gives.

    ``frame_end`` is where the frame header ends (``Header.end``). ``None`` leaves the image to OpenCV: without
    simplejpeg, and for what is not grey or of three colours, or not in order.
    """
    if simplejpeg is None:
        return None
    position = _frame_position(data, frame_end)
    if position is None:
        return None
    if data[position + 11] & 15 > 1:  # vertical sampling of the brightness
        rows += CHROMA_ROWS
    whole = rows >= height
    if not whole:
        view = memoryview(data)  # its slices are no copies
        data = b"".join((view[: position + 5], struct.pack(">H", rows), view[position + 7 :]))
    try:
        # Strict would take what follows the last row for damage.
        image = simplejpeg.decode_jpeg(data, "RGB", strict=whole)
    except ValueError:
        return None
    return np.asarray(image, dtype=np.uint8)


def _frame_position(data: bytes, frame_end: int) -> int | None:
    """Where the frame header begins: marker, length, precision, height, width, number of components and these."""
    for components in (1, 3):
        length = 8 + 3 * components
        position = frame_end - 2 - length
        if position > 0 and data[position] == 0xFF and data[position + 1] in HUFFMAN_FRAMES:
            if struct.unpack_from(">HB", data, position + 2) == (length, 8) and data[position + 9] == components:
                return position
    return None
