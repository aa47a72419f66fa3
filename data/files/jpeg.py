"""What a JPEG's segments (ITU-T T.81) tell, and decoding only its upper rows, with simplejpeg.

simplejpeg is the extra ``fast``. Entropy coding forces a decoder to start at the top, but it may
stop early. With a smaller height in the frame header it decodes only that many rows. OpenCV does so
as well, but prints a warning for each image.
"""

from __future__ import annotations

import struct

import numpy as np

from data.geometry import Image

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # markers of frame headers (table B.1)
HUFFMAN_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended and progressive
BARE = frozenset({0x01, *range(0xD0, 0xD8)})  # markers without a length
CHROMA_ROWS = 2  # chroma at half height: upsampling a row reads the next pair of rows


def frame_position(data: bytes) -> int | None:
    """Where the frame header begins: marker, length, precision, height, width, components."""
    position = 2
    try:
        while data[position] == 0xFF:
            marker = data[position + 1]
            if marker in FRAMES:
                return position
            if marker == 0xFF:  # a fill byte
                position += 1
            elif marker in BARE:
                position += 2
            else:
                position += 2 + struct.unpack_from(">H", data, position + 2)[0]
    except (IndexError, struct.error):
        pass
    return None


def is_cut_short(data: bytes) -> bool:
    """Whether a JPEG is truncated. Decoders notice it for the other types.

    The end marker cannot occur within the pixels (T.81, B.1.1.2), but it can in a thumbnail before
    them. Cameras and tools may append data behind it.
    """
    position = frame_position(data)
    return position is None or data.rfind(b"\xff\xd9", position) < 0


def decode_rows(data: bytes, height: int, rows: int) -> Image | None:
    """Decode at least the first ``rows`` of ``height`` rows to RGB; the pixels equal OpenCV's.

    ``None`` leaves the image to OpenCV: without simplejpeg, for other than one or three components,
    and for damaged files.
    """
    position = frame_position(data) if simplejpeg is not None else None
    if position is None or data[position + 1] not in HUFFMAN_FRAMES or data[position + 4] != 8:
        return None
    if data[position + 9] not in (1, 3):
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
