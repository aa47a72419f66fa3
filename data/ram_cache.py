"""Decoded images of a data set in one file that all processes of a node map: one copy, whatever their number.

The file belongs on a memory file system (/dev/shm). It holds one byte per image, 1 where it could be read, and then
the pixels of all images one after the other, in their annotated sizes.
"""

from __future__ import annotations

import os
import shutil
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from data.annotations import Annotations
from data.errors import DataError

if TYPE_CHECKING:
    from data.images import ImageSource


class RamCache:
    """The images of a finished cache file. Once it is open everywhere the file may be unlinked."""

    def __init__(self, path: Path, annotations: Annotations) -> None:
        self._sizes = annotations.sizes
        self._starts = _starts(annotations)
        pixels = np.memmap(path, dtype=np.uint8, mode="r")
        assert len(pixels) == self._starts[-1], f"{path} was made from other annotations"
        self._bytes = pixels.view(np.ndarray)

    def read(self, index: int) -> NDArray[np.uint8] | None:
        """The image (h, w, 3), read-only, or ``None`` where it could not be read when the cache was built."""
        if not self._bytes[index]:
            return None
        return self._bytes[self._starts[index] : self._starts[index + 1]].reshape(*self._sizes[index], 3)


def build_ram_cache(images: ImageSource, path: Path) -> None:
    """Decodes all images into ``path``, unless the file is there already; one process on each node calls this first.

    The file appears whole or not at all. Raises ``DataError`` where memory does not suffice, before any work, or, with
    ``data.on_error=stop``, where an image cannot be read.
    """
    if path.exists():
        return
    annotations = images.annotations
    starts = _starts(annotations)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        _reserve(temporary, int(starts[-1]))
        target = np.memmap(temporary, dtype=np.uint8, mode="r+")

        def fill(index: int) -> None:
            image = images.read(index)
            if image is not None:
                target[starts[index] : starts[index + 1]] = image.reshape(-1)
                target[index] = 1

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # OpenCV decodes outside the interpreter's lock
            count = len(annotations)
            for _ in tqdm(pool.map(fill, range(count)), "decoding images", count, disable=None, leave=False):
                pass
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)  # gone already after the rename


def _starts(annotations: Annotations) -> NDArray[np.int64]:
    """Where each image (N) starts in the file, and where the last one ends: (N + 1,)."""
    lengths = annotations.sizes.astype(np.int64).prod(axis=1) * 3
    starts: NDArray[np.int64] = len(annotations) + np.concatenate([[0], np.cumsum(lengths)])
    return starts


def _reserve(path: Path, size: int) -> None:
    """Makes a file of ``size`` bytes with memory behind all of them: a mapped page that is missing later kills."""
    try:
        free = shutil.disk_usage(path.parent).free
        if size > free:
            raise DataError(
                f"data.cache=ram needs {size / 2**30:.1f} GiB in {path.parent}, where {free / 2**30:.1f} GiB are free. "
                "fix: data.cache=none"
            )
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        raise DataError(
            f"data.cache=ram cannot write {size / 2**30:.1f} GiB to {path.parent} ({error.strerror}). "
            "fix: data.cache=none"
        ) from error
