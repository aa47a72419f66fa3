"""Whether the file of a video ends early, by the parts of its container."""

import os
from pathlib import Path

FILL = 0x7F  # for what is missing of a part's start: then its length is beyond the end
SLACK = 8  # bytes that a whole AVI may lack: some writers count this header twice
BOXES = tuple(b"ftyp moov mdat moof free skip wide uuid mfra sidx styp meta udta pnot".split())
SEGMENT, CLUSTER = b"\x18\x53\x80\x67", b"\x1f\x43\xb6\x75"
ELEMENTS = (
    *(b"\x1aE\xdf\xa3", SEGMENT, CLUSTER, b"\x11M\x9bt", b"\x15I\xa9f", b"\x16T\xaek", b"\x1cS\xbbk", b"\x12T\xc3g"),
    *(b"\xa3", b"\xa0", b"\xe7", b"\xec"),  # blocks, times, gaps
)


def ends_early(path: Path) -> bool:
    """Whether a video ends inside a part of its container; False, too, where that does not tell.

    Parts are the boxes of MP4 (ISO 14496-12), RIFF chunks of AVI, elements of Matroska (RFC 9559),
    objects of ASF and packets of an MPEG transport stream (ISO 13818-1).
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        start, at = file.read(2 * 192), 0
        for first, length in ((0, 188), (4, 192)):
            if start[first::length][:2] == b"GG":
                file.seek(size - size % length + first)
                return file.read(1) == b"G"  # of a packet that is not whole
        while at < size:
            file.seek(at)
            length = _part_length(file.read(24).ljust(24, bytes([FILL])))
            if length == 0:
                return False
            at += length
    return at > size + (SLACK if start[:4] == b"RIFF" else 0)


def _part_length(head: bytes) -> int:
    """Bytes of the part of a container that starts so; 0 if they are unknown."""
    if head[:4] == b"RIFF":
        length = int.from_bytes(head[4:8], "little")
        return 8 + length if 0 < length < 2**32 - 1 else 0
    if head[:4] in (b"\x30\x26\xb2\x75", b"\x36\x26\xb2\x75"):  # header and data of ASF
        return int.from_bytes(head[16:24], "little")
    if head[:3] == b"FLV":
        return 13
    if head[0] in (8, 9, 18) and set(head[8:11]) <= {0, FILL}:  # sound, pictures, data of FLV
        return 15 + int.from_bytes(head[1:4])
    if head[4:8] in BOXES:
        length = int.from_bytes(head[:4])
        return int.from_bytes(head[8:16]) if length == 1 else length
    name = head[:4] if head[:4] in ELEMENTS else head[:1]
    if name not in ELEMENTS:
        return 0
    width = 9 - head[len(name)].bit_length()  # a number says how wide it is
    length = int.from_bytes(head[len(name) : len(name) + width]) - (1 << 7 * width)
    is_endless = length == (1 << 7 * width) - 1
    if width > 8 or (is_endless and name not in (SEGMENT, CLUSTER)):
        return 0
    return len(name) + width + (0 if is_endless else length)
