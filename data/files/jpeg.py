"""Decode only the upper rows of a JPEG, with simplejpeg (the extra ``fast``).

Entropy coding forces a decoder to start at the top, but it may stop early. With a smaller height
in the frame header it decodes only that many rows. OpenCV does so as well, but prints a warning
for each image.
"""

from __future__ import annotations

import struct

import numpy as np

from data.geometry import Image

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

HUFFMAN_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended and progressive (T.81, table B.1)
CHROMA_ROWS = 2  # chroma at half height: upsampling a row reads the next pair of rows


def decode_rows(data: bytes, frame_end: int, height: int, rows: int) -> Image | None:
    """Decode at least the first ``rows`` of ``height`` rows to RGB; the pixels equal OpenCV's.

    ``frame_end`` is where the frame header ends (``Header.end``). ``None`` leaves the image to
    OpenCV: without simplejpeg, for other than one or three components, and for damaged files.
    """
    if simplejpeg is None:
        return None
    position = _frame_position(data, frame_end)
    if position is None:
        return None
    if data[position + 11] & 15 > 1:  # vertical sampling of luma
        rows += CHROMA_ROWS
    whole = rows >= height
    if not whole:
        view = memoryview(data)  # slices without copies
        data = b"".join((view[: position + 5], struct.pack(">H", rows), view[position + 7 :]))
    try:
        # A strict decoder takes the data behind the last row for damage.
        image = simplejpeg.decode_jpeg(data, "RGB", strict=whole)
    except ValueError:
        return None
    return np.asarray(image, dtype=np.uint8)


def _frame_position(data: bytes, frame_end: int) -> int | None:
    """Where the frame header begins: marker, length, precision, height, width, components."""
    for components in (1, 3):
        length = 8 + 3 * components
        position = frame_end - 2 - length
        if (
            position > 0
            and data[position] == 0xFF
            and data[position + 1] in HUFFMAN_FRAMES
            and struct.unpack_from(">HB", data, position + 2) == (length, 8)
            and data[position + 9] == components
        ):
            return position
    return None
