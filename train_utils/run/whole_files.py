"""Small files that are there whole or not at all, also after a kill, a power cut or on a full disk."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A text file to be written that takes the name ``path`` when the body is over and its content is on the disk.

    After an error ``path`` is what it was before. Raises OSError.
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
    """Keep the text of a file that is about to be changed beside it, under the time of now. Raises OSError."""
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
