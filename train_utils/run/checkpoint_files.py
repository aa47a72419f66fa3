"""Where checkpoints are; imports no torch, so that a wrong path is refused at once."""

from __future__ import annotations

from pathlib import Path

from train_utils.errors import CheckpointError

FOLDER = "checkpoints"


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
    file = path / FOLDER / f"{which}.pt"
    if not file.is_file():
        raise CheckpointError(f"the folder {path.absolute()} has no {FOLDER}/{which}.pt. fix: {other_files(file)}")
    return file


def other_files(file: Path) -> str:
    """What to try instead of ``file``: the checkpoints beside it."""
    others = sorted(other.name for other in file.parent.glob("*.pt") if other != file)
    return f"try {' or '.join(others)} in {file.parent}" if others else "give a run folder or a .pt file of train.py"
