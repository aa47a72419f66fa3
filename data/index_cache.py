"""The folders that indices live in: named by the content of their sources, written whole or not at all.

A folder holds one ``.npy`` file per array and ``about.json``. Nothing is ever changed in place: other sources have
another key and so another folder, and a build becomes visible by one rename, after its files reached the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.errors import DataError

FORMAT_VERSION = 1  # of the columns and of the checks that made them: raise it when either changes
COLUMNS = (
    "name_bytes",
    "name_offsets",
    "image_ids",
    "sizes",
    "offsets",
    "boxes_xywh",
    "classes",
    "crowd",
    "areas",
    "category_ids",
)
STALE_SECONDS = 24 * 3600  # a temporary folder this old belongs to a build that was killed


def index_key(hashed: Sequence[Path], stamped: Sequence[Path], asked: Sequence[Any]) -> str:
    """The name of the index made from these sources, as 32 hexadecimal digits.

    ``hashed`` files count by their content; ``stamped`` ones, which are many and small, by size and by the times of
    their last change: ctime as well, since an edit can keep size and mtime but not ctime. ``asked`` is whatever else
    the index depends on, as plain data.
    """
    digest = hashlib.sha256(json.dumps([FORMAT_VERSION, *asked]).encode())
    for path in hashed:
        with path.open("rb") as file:
            digest.update(f"{path}\n{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    for path in stamped:
        status = path.stat()
        digest.update(f"{path}\n{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}\n".encode())
    return digest.hexdigest()[:32]


def find_index(index_dir: Path, key: str) -> Path | None:
    """The folder of an index, or ``None`` where it has not been built."""
    folder = index_dir / key
    return folder if folder.is_dir() else None


def build_index(
    index_dir: Path, key: str, columns: Mapping[str, NDArray[np.generic]], about: Mapping[str, Any]
) -> Path:
    """Writes an index and returns its folder; where another process finished the same one first, that one is used.

    Raises ``DataError`` where ``index_dir`` cannot be written.
    """
    folder = index_dir / key
    temporary = index_dir / f".{key}.{uuid.uuid4().hex}.tmp"
    try:
        index_dir.mkdir(parents=True, exist_ok=True)
        _remove_stale(index_dir)
        temporary.mkdir()
        for name in COLUMNS:
            with (temporary / f"{name}.npy").open("wb") as file:
                np.save(file, columns[name], allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        with (temporary / "about.json").open("w", encoding="utf-8") as file:
            json.dump(about, file)
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, folder)
    except OSError as error:
        raise DataError(
            f"cannot write the index of the data set to {index_dir} ({error.strerror}). "
            "fix: set data.index_dir to a folder with space that you may write to"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already after a rename
    return folder


def publish(temporary: Path, folder: Path) -> None:
    """Renames a finished folder to its final name; keeps the one that stands there if another process was faster."""
    try:
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        return
    parent = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def load_index(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of an index, memory-mapped and read-only, and its ``about``."""
    try:
        arrays = {name: _map(folder / f"{name}.npy") for name in COLUMNS}
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"the index {folder} is damaged ({error}). fix: delete that folder") from error
    return arrays, about


def _map(path: Path) -> NDArray[np.generic]:
    # An ndarray over the mapped pages: np.memmap's own indexing costs a Python call for each slice.
    mapped: NDArray[np.generic] = np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
    return mapped


def _remove_stale(index_dir: Path) -> None:
    limit = time.time() - STALE_SECONDS
    for entry in index_dir.glob(".*.tmp"):
        with suppress(FileNotFoundError):  # its own process may be done with it at this moment
            if entry.stat().st_mtime < limit:
                shutil.rmtree(entry, ignore_errors=True)
