"""Atomic writes of small files: whole or absent, even after a kill, power cut or full disk."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """Open a text file that takes the name ``path`` once its content is on the disk.

    After an error ``path`` is unchanged. Raises OSError.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def keep_copy(path: Path) -> None:
    """Copy a text file that is about to change to a timestamped name beside it. Raises OSError."""
    kept = path.with_name(f"{path.stem}_until_{time.strftime('%Y-%m-%d_%H-%M-%S')}{path.suffix}")
    with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file, whole_file(kept) as copy:
        copy.write(file.read())


def sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
