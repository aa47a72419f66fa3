"""Folders of indices, named by the status of their sources and written whole or not at all.

A folder holds one ``.npy`` file per array and ``about.json``. Nothing changes in place: other
sources have another key and folder. A build is synced to the disk, then appears by one rename.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import time
import uuid
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.errors import DataError
from data.files import in_chunks

FORMAT_VERSION = 6  # raise it when the columns or the checks change
STALE_SECONDS = 24 * 3600  # age of a temporary folder whose build was killed


class Stamps(NamedTuple):
    """File status without content. An edit can keep size and mtime, but not ctime."""

    digest: str  # of names, sizes and times
    is_file: NDArray[np.bool_]  # (N,) whether each is a regular file
    exists: NDArray[np.bool_]  # (N,) whether each exists as anything


def stamp_files(paths: Sequence[str]) -> Stamps:
    """Stat many files."""
    parts = list(in_chunks(_stamp_chunk, paths, "looking for files"))
    columns = np.concatenate([part for _, part in parts]) if parts else np.zeros((0, 4), dtype=np.int64)
    digest = hashlib.sha256(b"".join(part for part, _ in parts)).hexdigest()
    return Stamps(
        digest, np.array([stat.S_ISREG(mode) for mode in columns[:, 0].tolist()], dtype=bool), columns[:, 0] != 0
    )


def _stamp_chunk(paths: Sequence[str]) -> tuple[bytes, NDArray[np.int64]]:
    columns = array("q")
    for path in paths:
        try:
            status = os.stat(path)
        except (OSError, ValueError):  # ValueError: an impossible name
            columns.extend((0, 0, 0, 0))
        else:
            columns.extend((status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    digest = hashlib.sha256("\n".join(paths).encode("utf-8", "surrogateescape"))
    digest.update(columns)
    return digest.digest(), np.frombuffer(columns, dtype=np.int64).reshape(-1, 4)


def index_key(stamps: Sequence[str], asked: Sequence[Any]) -> str:
    """The name of the index made from these sources: 32 hexadecimal digits.

    ``stamps`` are digests of the files, ``asked`` is everything else the index depends on, as plain
    data.
    """
    return hashlib.sha256(json.dumps([FORMAT_VERSION, *stamps, *asked]).encode()).hexdigest()[:32]


def build_index(
    index_dir: Path, key: str, columns: Mapping[str, NDArray[np.generic]], about: Mapping[str, Any]
) -> Path:
    """Write an index and return its folder, or that of a process that finished it first.

    Raises ``DataError`` where ``index_dir`` cannot be written.
    """
    folder = index_dir / key
    try:
        with new_folder(folder) as temporary:
            _remove_stale(index_dir)
            for name, column in columns.items():
                np.save(temporary / f"{name}.npy", column, allow_pickle=False)
            content = json.dumps({**about, "columns": list(columns)})
            (temporary / "about.json").write_text(content, encoding="utf-8")
            for path in temporary.iterdir():
                _sync(path)
    except OSError as error:
        raise DataError(
            f"cannot write the index of the data set to {index_dir} ({error.strerror}). "
            "fix: set data.index_dir to a folder with space that you may write to"
        ) from error
    return folder


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
            return
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
        arrays = {name: _map(folder / f"{name}.npy") for name in about.pop("columns")}
    except (OSError, ValueError) as error:
        raise DataError(f"the index {folder} is damaged ({error}). fix: delete that folder") from error
    return arrays, about


class MappedFile(NamedTuple):
    """A reference to an array that is one whole file of an index."""

    path: Path


def mapped_file(value: object) -> MappedFile | None:
    """The file that an array of ``load_index`` maps; ``None`` for anything else."""
    if isinstance(value, np.ndarray) and isinstance(value.base, np.memmap) and value.base.shape == value.shape:
        return MappedFile(Path(str(value.base.filename)))
    return None


def map_again(value: Any) -> Any:
    """The array of a MappedFile; anything else as it is."""
    return _map(value.path) if isinstance(value, MappedFile) else value


def _map(path: Path) -> NDArray[np.generic]:
    # A plain ndarray over the mapped pages: np.memmap makes a Python call for each slice.
    mapped: NDArray[np.generic] = np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
    return mapped


def _remove_stale(index_dir: Path) -> None:
    limit = time.time() - STALE_SECONDS
    for entry in index_dir.glob(".*.tmp"):
        with suppress(FileNotFoundError):  # its own process may just have removed it
            if entry.stat().st_mtime >= limit:
                continue
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink()
