"""Where checkpoints are, and atomic writes of small files; imports no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from train_utils.errors import CheckpointError

CHECKPOINTS = "checkpoints"  # folder in that of a run


def find_checkpoint(path: Path, which: str) -> Path:
    """The checkpoint file ``path``, or that of the run folder ``path``. Raises CheckpointError."""
    if path.suffix in (".onnx", ".pt2"):
        raise CheckpointError(
            f"{path} is not a checkpoint: ckpt takes run folders and their .pt files, and .onnx files only in "
            "predict.py and eval.py. fix: ckpt=<the run folder or .pt file that it was exported from>"
        )
    if path.is_file():
        return path
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {path.absolute()}. fix: give a run folder or a .pt file")
    file = path / CHECKPOINTS / f"{which}.pt"
    if not file.is_file():
        raise CheckpointError(f"the folder {path.absolute()} has no {CHECKPOINTS}/{which}.pt. fix: {other_files(file)}")
    return file


def other_files(file: Path) -> str:
    """What to try instead of ``file``: the checkpoints beside it."""
    others = sorted(other.name for other in file.parent.glob("*.pt") if other != file)
    return f"try {' or '.join(others)} in {file.parent}" if others else "give a run folder or a .pt file of train.py"


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
