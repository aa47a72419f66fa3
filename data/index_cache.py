"""Folders of indices, named by the status of their sources and written whole or not at all.

A folder holds one ``.npy`` file per array and ``about.json``. Nothing changes in place: other
sources have another key and folder. A build is synced to the disk, then appears by one rename.
"""

import hashlib
import json
import os
import shutil
import stat
import uuid
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.errors import DataError
from data.files import in_chunks

FORMAT_VERSION = 7  # raise it when the columns or the checks change


class Stamps(NamedTuple):
    """File status without content. An edit can keep size and mtime, but not ctime."""

    digest: str  # of names, sizes and times
    is_file: NDArray[np.bool_]  # (N,) whether each is a regular file


def stamp_files(paths: Sequence[str]) -> Stamps:
    """Stat many files."""
    parts = list(in_chunks(_stamp_chunk, paths, "looking for files"))
    digest = hashlib.sha256(b"".join(part for part, _ in parts)).hexdigest()
    return Stamps(digest, np.array([is_file for _, chunk in parts for is_file in chunk], dtype=bool))


def _stamp_chunk(paths: Sequence[str]) -> tuple[bytes, list[bool]]:
    columns, are_files = array("q"), []
    for path in paths:
        try:
            status = os.stat(path)
        except (OSError, ValueError):  # ValueError: an impossible name
            columns.extend((0, 0, 0, 0))
            are_files.append(False)
        else:
            columns.extend((status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
            are_files.append(stat.S_ISREG(status.st_mode))
    digest = hashlib.sha256("\n".join(paths).encode("utf-8", "surrogateescape"))
    digest.update(columns)
    return digest.digest(), are_files


def index_key(parts: Sequence[Any]) -> str:
    """The name of an index, 32 hexadecimal digits, by all that it depends on, as plain data."""
    return hashlib.sha256(json.dumps([FORMAT_VERSION, *parts]).encode()).hexdigest()[:32]


def build_index(folder: Path, columns: Mapping[str, NDArray[np.generic]], about: Mapping[str, Any]) -> None:
    """Write an index, unless another process finishes it first.

    Raises ``DataError`` where the folder cannot be written.
    """
    try:
        with new_folder(folder) as temporary:
            for name, column in columns.items():
                np.save(temporary / f"{name}.npy", column, allow_pickle=False)
            content = json.dumps({**about, "columns": list(columns)})
            (temporary / "about.json").write_text(content, encoding="utf-8")
            for path in temporary.iterdir():
                _sync(path)
    except OSError as error:
        raise DataError(
            f"cannot write the index of the data set to {folder.parent} ({error.strerror}). "
            "fix: set data.index_dir to a folder with space that you may write to"
        ) from error


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Give a temporary folder that becomes ``folder`` at the end, unless another process made it.

    After an error nothing is left of it. Raises ``OSError``.
    """
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        else:
            _sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # no longer there after the rename


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_index(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of an index, memory-mapped and read-only, and its ``about``."""
    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        # Plain ndarrays over the mapped pages: np.memmap makes a Python call for each slice.
        arrays = {
            name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False).view(np.ndarray)
            for name in about.pop("columns")
        }
    except (OSError, ValueError) as error:
        raise DataError(f"the index {folder} is damaged ({error}). fix: delete that folder") from error
    return arrays, about
