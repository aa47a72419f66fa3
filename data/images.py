"""Read the images of a data set as annotated: from their files, or a cache of all processes."""

import hashlib
import io
import logging
import os
import re
import shutil
import struct
import uuid
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import cv2
import numpy as np
import PIL.Image
import torch

from data import headers
from data.config import ImageCache, OnError
from data.errors import DataError
from data.geometry import Image
from data.headers import KNOWN_TYPES, MAX_PIXELS, Header, read_header, read_segments, turn_decoded
from data.index import Annotations
from data.io import Int64, stamp_files, usable_cores
from data.layouts import read_file
from data.progress import tracked
from data.remote import FETCHES, Fetcher, FetchError, is_remote

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

logger = logging.getLogger(__name__)

HUFFMAN_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended and progressive (T.81, table B.1)
CHROMA_ROWS = 2  # chroma at half height: upsampling a row reads the next pair of rows
OF_PILLOW = ("AVIF", "GIF", "TIFF")  # whose transparent pixels OpenCV mixes up, darkens or fills
_LARGEST = re.compile(rb"P[56](?:(?:\s|#[^\n]*\n)+(\d+)){3}\s")  # value in Netpbm's binary files
AS_STORED = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION  # RGB; OpenCV turns only TIFF files
CHECKED_IMAGES = 20  # read before a training starts
MAX_UNREADABLE = 20  # in a row; also of a set of up to 2,000 images
LEVELS = 16  # of 256; 12 bits in files of 16 have no more
FEW_LEVELS = "images with few of the 256 levels, as of 12 bits in files of 16, or in a narrow band of them"
CACHE_VERSION = 4  # raise it when the file layout or the decoding changes
MISSING = -1  # in place of the checksum of an image that could not be read


def decode_rows(data: bytes, height: int, rows: int) -> Image | None:
    """Decode the first ``rows`` of a JPEG, or more, to OpenCV's pixels in RGB; or return ``None``.

    With a smaller height in the frame header, simplejpeg (the extra ``fast``) decodes no more rows.
    """
    segments = read_segments(data)
    if simplejpeg is None or segments is None:
        return None
    position, _ = segments
    if data[position + 1] not in HUFFMAN_FRAMES or data[position + 4] != 8 or data[position + 9] not in (1, 3):
        return None
    if data[position + 11] & 15 > 1:  # vertical sampling of luma
        rows += CHROMA_ROWS
    whole = rows >= height
    if not whole:
        data = b"".join((data[: position + 5], struct.pack(">H", rows), memoryview(data)[position + 7 :]))
    with suppress(ValueError):  # a strict decoder takes the data behind the last row for damage
        return np.asarray(simplejpeg.decode_jpeg(data, "RGB", strict=whole), np.uint8)
    return None


def jpeg_damage(data: bytes) -> str | None:
    """What a strict decoder finds wrong inside a JPEG that others read; None without simplejpeg."""
    try:
        if simplejpeg is not None:
            simplejpeg.decode_jpeg(data, "GRAY", strict=True)
    except ValueError as error:
        if "Corrupt" in str(error):
            return str(error)
    return None


def open_image(path: str, fix: str, read: Callable[[str], bytes] = read_file) -> tuple[bytes, Header]:
    """Read a complete image file of a known type and a size that is safe to decode.

    ``read`` returns its content. Raises ``DataError``, ending with ``fix``.
    """
    try:
        data = read(path)
        header = read_header(data)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})", fix) from error
    except headers.TooLargeError as error:
        raise DataError(f"{path} has more than the {MAX_PIXELS:,} pixels that are read", fix) from error
    if header is None:
        raise DataError(f"{path} is not an image of a known type ({KNOWN_TYPES})", fix)
    # Decoders notice it in other types. The end marker cannot occur in the pixels (T.81, B.1.1.2),
    # but it may in a thumbnail before them, and cameras may append data behind it.
    if header.kind == "JPEG" and data.rfind(b"\xff\xd9", (read_segments(data) or (0,))[0]) < 0:
        raise DataError(f"{path} is cut short: the end of its JPEG data is missing", fix)
    return data, header


def decode_stored(path: str | Path, data: bytes, header: Header, fix: str) -> Image:
    """Decode an image with OpenCV, not yet turned. Raises ``DataError``."""
    if header.kind == "PPM" and (found := _LARGEST.match(data)) and found[1] not in (b"255", b"65535"):
        why = f"its values go to {found[1][:20].decode()}, not to 255 or 65535"
        raise DataError(f"{path} cannot be decoded: {why}", fix)
    if header.kind in OF_PILLOW:
        with suppress(OSError, SyntaxError, ValueError), PIL.Image.open(io.BytesIO(data)) as opened:
            if opened.has_transparency_data:  # which Pillow drops
                return np.asarray(opened.convert("RGB"))
    # OpenCV prints warnings about broken images that do not name the file.
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    # From memory OpenCV refuses a truncated image; from a file it fills up a JPEG with grey.
    image = cv2.imdecode(np.frombuffer(data, np.uint8), AS_STORED)
    if image is None or image.shape[2:] != (3,) or image.dtype != np.uint8:
        raise DataError(f"{path} cannot be decoded: its {header.kind} data are damaged, or not of 8 or 16 bits", fix)
    return np.asarray(image, np.uint8)


class ImageSource:
    """The decoded images of a data set by position, from their files or a complete ``cache`` file.

    The cache may be unlinked once every process has mapped it.
    """

    def __init__(self, annotations: Annotations, on_error: OnError, cache: Path | None = None) -> None:
        self.annotations, self.on_error = annotations, on_error
        self.cache = cache
        self.is_remote = is_remote(annotations.image_root)
        self.fetcher = Fetcher() if self.is_remote else None
        # Shared with loader processes: 1 for an image left out since take_left_out(), 2 for others.
        self._left_out = torch.zeros(len(annotations), dtype=torch.uint8).share_memory_()
        self._in_a_row, self.quiet = 0, False  # quiet: another rank says which images are left out
        more = ", or set data.on_error=skip to leave such images out" if on_error != OnError.skip else ""
        self._fix = f"replace the file{more}"
        if cache is not None:
            self._starts = _starts(annotations)
            self._file = cache.open("rb")
            self._bytes = np.memmap(self._file, dtype=np.uint8, mode="r").view(np.ndarray)
            self._checks = self._bytes[: self._starts[0]].view(np.int64)
            # Each image is checked only once, as that takes time. Forked workers share the results
            # (N,) and whether damage was reported.
            self._whole = torch.zeros(len(annotations) + 1, dtype=torch.bool).share_memory_().numpy()

    def __reduce__(self) -> tuple[object, ...]:
        cache = self.cache  # a spawned worker maps it itself, unlinked or not
        if cache is not None and not cache.exists():
            cache = Path(f"/proc/{os.getpid()}/fd/{self._file.fileno()}")
        made_of = self.annotations, self.on_error, cache
        return type(self), made_of, {"_left_out": self._left_out, "fetcher": self.fetcher}

    def read(self, index: int, rows: int | None = None) -> Image | None:
        """The image (h, w, 3) in RGB, in its annotated size; rows beyond ``rows`` may be missing.

        An unreadable image raises ``DataError`` or, with ``on_error=skip``, is logged once and
        returned as ``None``. Too many of them, or an empty folder, always raise ``DataError``.
        """
        try:
            image = self._cached(index) if self.cache is not None else None
            if image is None:
                image = self._decode(index, rows)
        except DataError as error:
            self._leave_out(index, error)
            return None
        self._in_a_row = 0
        return image

    @property
    def readers(self) -> int:
        """The number of threads that read fastest: OpenCV decodes without the GIL."""
        return FETCHES if self.is_remote else len(usable_cores())

    def begin(self, positions: Iterable[int]) -> None:
        """Begin to fetch images that will be read, in this order; nothing for files on a disk."""
        if self.fetcher is not None and self.cache is None:
            self.fetcher.begin(map(self.annotations.path, positions))

    def read_sample(self) -> dict[str, list[str]]:
        """Read a few images, which may be gone. Returns paths by kind. Raises as ``read``."""
        spread = np.linspace(0, len(self.annotations) - 1, CHECKED_IMAGES, dtype=np.int64)
        indices = np.unique(spread).tolist()
        self.begin(indices)
        found: dict[str, list[str]] = {FEW_LEVELS: [], headers.SEVERAL: []}
        for index in indices:
            image, path = self.read(index, 1), self.annotations.path(index)
            is_cut = path.lower().endswith((".jpg", ".jpeg"))  # of these one row is read
            if image is not None and not is_cut and np.ptp(np.percentile(image[::4, ::4], (1, 99))) < LEVELS:
                found[FEW_LEVELS].append(path)
            if headers.has_frames(path):
                found[headers.SEVERAL].append(path)
        return found

    def take_left_out(self) -> Int64:
        """Positions (k,) of images left out since the last call, also by loader processes."""
        flags = self._left_out.numpy()
        positions = np.flatnonzero(flags == 1)
        flags[positions] = 2
        return positions

    def check_left_out(self, count: int, last: DataError) -> str:
        """Describe ``count`` unreadable images and the ``last`` one.

        Raises DataError for 20 in a row, 1 % of a large set, 20 of a smaller, a quarter of a tiny.
        """
        total = len(self.annotations)
        error = DataError(f"{count:,} of {total:,} images cannot be read, the last one: {last.sentence}", last.fix)
        most = max(total // 100, min(MAX_UNREADABLE, (total + 2) // 4))
        if self._in_a_row >= MAX_UNREADABLE or count > most:
            raise error
        return str(error)

    def _leave_out(self, index: int, error: DataError) -> None:
        """Count an unreadable image. Raises ``DataError`` if it may not be left out."""
        if isinstance(error, FetchError):
            raise error
        folder = os.path.dirname(self.annotations.path(index))
        if self.cache is None and isinstance(self.annotations.image_root, Path) and _is_empty(folder):
            raise DataError(f"{folder}, a folder of images, is gone, empty or unreadable", "restore it") from error
        if self.on_error != OnError.skip:
            raise error
        flags = self._left_out.numpy()
        if not flags[index] and not self.quiet:
            logger.warning("left out: %s", error)
        flags[index] = 1
        self._in_a_row += 1
        self.check_left_out(int(np.count_nonzero(flags == 1)), error)

    def _cached(self, index: int) -> Image | None:
        """An image from the cache; None if it is damaged there."""
        if os.fstat(self._file.fileno()).st_size >= self._starts[-1]:  # what is mapped beyond its end kills
            if self._checks[index] == MISSING:
                raise DataError(f"{self.annotations.path(index)} could not be read for data.cache", self._fix)
            pixels = self._bytes[self._starts[index] : self._starts[index + 1]]
            self._whole[index] = self._whole[index] or zlib.crc32(pixels.data) == self._checks[index]
            if self._whole[index]:
                return pixels.reshape(*self.annotations.sizes[index], 3)
        if not self._whole[-1]:
            self._whole[-1] = True
            where = f"{self.cache} is damaged at {self.annotations.path(index)} and perhaps at others"
            logger.warning("the image cache %s, which are read from their files. fix: delete the cache", where)
        return None

    def _decode(self, index: int, rows: int | None) -> Image:
        path, size = self.annotations.path(index), tuple(self.annotations.sizes[index].tolist())
        data, header = open_image(path, self._fix, read_file if self.fetcher is None else self.fetcher.read)
        orientation = self.annotations.turn.orientation(header, size)
        if header.kind == "JPEG" and header.size(orientation) == size:
            wanted = header.height if rows is None or orientation != 1 else rows
            quickly = decode_rows(data, header.height, wanted)
            if quickly is not None:
                return turn_decoded(quickly, orientation)
            if damage := jpeg_damage(data):
                logger.warning("%s is used as far as it can be decoded (%s)", path, damage)
        image = turn_decoded(decode_stored(path, data, header, self._fix), orientation)
        if image.shape[:2] != size:
            found, annotated = (f"{width:,} x {height:,}" for height, width in (image.shape[:2], size))
            fix = "data.exif=apply" if header.size(header.orientation) == size else self._fix  # ignored
            raise DataError(f"{path} has {found} pixels, its annotations are for {annotated}", fix)
        return image


def image_cache_name(annotations: Annotations, on_error: OnError) -> str:
    """Name the cache of these images; the name changes with any file and how it is turned."""
    paths = [annotations.path(index) for index in range(len(annotations))]
    made_of = f"{CACHE_VERSION} {stamp_files(paths).digest} {on_error.value} {annotations.turn}"
    key = hashlib.sha256(made_of.encode())
    key.update(annotations.sizes.tobytes())
    return f"{key.hexdigest()[:32]}.images"


def build_image_cache(images: ImageSource, path: Path, kind: ImageCache) -> None:
    """Decode all images into ``path`` unless it exists; one process per node calls this first.

    The file starts with the CRC-32 of each image, or ``MISSING``, and that of these, as int64; the
    pixels of all images follow. Raises ``DataError`` for too little room, or an unreadable image.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    starts, free = _starts(images.annotations), shutil.disk_usage(path.parent).free
    if path.exists():
        table = np.fromfile(path, np.int64, starts[0] // 8) if path.is_file() else np.ones(1, np.int64)
        if path.stat().st_size == starts[-1] and zlib.crc32(table[:-1].data) == table[-1]:
            return
        logger.warning("the image cache %s is damaged and will be rebuilt", path)
    if starts[-1] > free:
        room = f"{starts[-1] / 2**30:.1f} GiB in {path.parent}, where {free / 2**30:.1f} GiB are free"
        raise DataError(f"data.cache={kind} needs {room}", "data.cache=none")
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    table = np.full(len(images.annotations) + 1, MISSING, np.int64)

    def fill(index: int) -> None:
        image = images.read(index)
        if image is not None:
            pixels = np.ascontiguousarray(image)
            table[index] = zlib.crc32(pixels.data)
            with temporary.open("r+b") as file:  # a memory map would crash on a full disk
                file.seek(starts[index])
                file.write(pixels.data)

    try:
        with temporary.open("wb") as file:
            file.truncate(starts[-1])
        with ThreadPoolExecutor(images.readers) as pool:
            count = len(images.annotations)
            for _ in tracked(pool.map(fill, range(count)), count, "decoding images"):
                pass
        table[-1] = zlib.crc32(table[:-1].data)
        with temporary.open("r+b") as start:
            start.write(table.data)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def _is_empty(folder: str) -> bool:
    """Whether a folder is gone, may not be read, or holds nothing."""
    with suppress(OSError), os.scandir(folder) as entries:
        return next(entries, None) is None
    return True


def _starts(annotations: Annotations) -> Int64:
    """Return the start of each image in the file and the end of the last one: (N + 1,)."""
    lengths = annotations.sizes.astype(np.int64).prod(axis=1) * 3
    return 8 * (len(annotations) + 1) + np.concatenate([[0], np.cumsum(lengths)])
