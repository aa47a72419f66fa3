"""Cache decoded images in one file that all processes of a node map: one copy per node.

The file lies on a memory file system (/dev/shm) or, to outlive the run, on a disk. It starts with
one byte per image, 1 if the image could be read. Then follow the pixels of all images in order, in
their annotated sizes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from data.config import ImageCache, OnError
from data.errors import DataError
from data.files.bars import counted
from data.files.reading import usable_cores
from data.index.annotations import Annotations
from data.index.cache import stamp_files

if TYPE_CHECKING:
    from data.images.source import ImageSource

ZEROS = bytes(1 << 20)  # written if the system cannot reserve file space
CACHE_VERSION = 2  # raise it when the file layout or the decoding changes


def kept_cache_name(annotations: Annotations, on_error: OnError) -> str:
    """Name the cache of these images; the name changes with any file or how it is turned."""
    paths = [os.path.join(annotations.image_root, annotations.file_name(i)) for i in range(len(annotations))]
    key = hashlib.sha256(f"{CACHE_VERSION} {stamp_files(paths).digest} {on_error.value} {annotations.turn}".encode())
    key.update(annotations.sizes.tobytes())
    return f"{key.hexdigest()[:32]}.images"


class CachedImages:
    """The images of a finished cache file, which may be unlinked once every process maps it."""

    def __init__(self, path: Path, annotations: Annotations) -> None:
        self._made_of = path, annotations
        self._sizes = annotations.sizes
        self._starts = _starts(annotations)
        pixels = np.memmap(path, dtype=np.uint8, mode="r")
        assert len(pixels) == self._starts[-1], f"{path} was made from other annotations"
        self._bytes = pixels.view(np.ndarray)

    def __reduce__(self) -> tuple[type[CachedImages], tuple[Path, Annotations]]:
        return CachedImages, self._made_of  # a spawned worker maps the file itself

    def read(self, index: int) -> NDArray[np.uint8] | None:
        """Return the read-only image (h, w, 3), or ``None`` if it was unreadable at build time."""
        if not self._bytes[index]:
            return None
        return self._bytes[self._starts[index] : self._starts[index + 1]].reshape(*self._sizes[index], 3)


def build_image_cache(images: ImageSource, path: Path, kind: ImageCache) -> None:
    """Decode all images into ``path`` unless it exists; one process per node calls this first.

    The file appears complete or not at all. ``kind`` is the value of ``data.cache``, for messages.
    Raises ``DataError`` before any work if there is too little room, and with
    ``data.on_error=stop`` if an image cannot be read.
    """
    if path.exists():
        return
    annotations = images.annotations
    starts = _starts(annotations)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _reserve(temporary, int(starts[-1]), kind)
        target = np.memmap(temporary, dtype=np.uint8, mode="r+")

        def fill(index: int) -> None:
            image = images.read(index)
            if image is not None:
                target[starts[index] : starts[index + 1]] = image.reshape(-1)
                target[index] = 1

        with ThreadPoolExecutor(len(usable_cores())) as pool:  # OpenCV decodes without the GIL
            count = len(annotations)
            for _ in counted(pool.map(fill, range(count)), "decoding images", count):
                pass
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def _starts(annotations: Annotations) -> NDArray[np.int64]:
    """Return the start of each image in the file and the end of the last one: (N + 1,)."""
    lengths = annotations.sizes.astype(np.int64).prod(axis=1) * 3
    starts: NDArray[np.int64] = len(annotations) + np.concatenate([[0], np.cumsum(lengths)])
    return starts


def _reserve(path: Path, size: int, kind: ImageCache) -> None:
    """Create a file of ``size`` allocated bytes: writing to a map of a full disk would crash."""
    try:
        free = shutil.disk_usage(path.parent).free
        if size > free:
            raise DataError(
                f"data.cache={kind} needs {size / 2**30:.1f} GiB in {path.parent}, where {free / 2**30:.1f} GiB "
                "are free. fix: data.cache=none"
            )
        with path.open("wb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                for start in range(0, size, len(ZEROS)):
                    file.write(ZEROS[: size - start])
    except OSError as error:
        raise DataError(
            f"data.cache={kind} cannot write {size / 2**30:.1f} GiB to {path.parent} ({error.strerror}). "
            "fix: data.cache=none"
        ) from error
