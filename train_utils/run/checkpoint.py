"""Checkpoints: one file of plain data, written atomically and checked bit by bit when read.

A file holds {"format", "version", "digest", "state"}. The digest is a sha256 over every key,
number, text and tensor of the state, because torch silently reads a tensor with a flipped bit.
Files are only read with ``weights_only=True``, so none can run code.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from train_utils.errors import CheckpointError, first_line
from train_utils.run.checkpoint_files import FOLDER, find_checkpoint, other_files
from train_utils.run.plain_data import digest_of, to_plain
from train_utils.run.whole_files import sync_folder

FORMAT = "hydra-yolov3-spp checkpoint"
VERSION = 1


def save_checkpoint(path: Path, state: dict[str, Any], keep_previous: bool = False) -> None:
    """Write ``state`` to ``path``; after an error the old file is unchanged.

    ``state`` consists of dicts (keys: str or int), lists, tuples, tensors of any device, numbers,
    strings, bools and None. With ``keep_previous`` the old file stays as ``<stem>.previous.pt``.
    Raises CheckpointError that names the entry that is not plain data, or the path, the reason and
    the free space.
    """
    plain = to_plain(state)
    content = {"format": FORMAT, "version": VERSION, "digest": digest_of(plain), "state": plain}
    temporary = path.with_name(f"{path.name}.tmp")  # a run has one writer: a leftover is overwritten
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        if keep_previous and path.exists():
            os.replace(path, previous_path(path))
        os.replace(temporary, path)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError about positions
        if temporary.is_file():
            temporary.unlink()
        raise CheckpointError(
            f"cannot write {path}: {first_line(error)} ({_free_bytes(path)} bytes are free there). "
            "fix: free some space, or choose another run_dir"
        ) from error


def load_checkpoint(path: Path, which: str = "best") -> dict[str, Any]:
    """Read the file ``path``, or ``checkpoints/<which>.pt`` of the run folder ``path``, to the CPU.

    Raises CheckpointError if it is missing, damaged, or not of this project.
    """
    file = find_checkpoint(path, which)
    content = _content(file)
    state: dict[str, Any] = content["state"]
    if digest_of(state) != content.get("digest"):
        raise CheckpointError(f"{file} is damaged: its content does not match its digest. fix: {other_files(file)}")
    return state


def peek_config(path: Path) -> dict[str, Any]:
    """Read only the configuration of the checkpoint that ``load_checkpoint`` would read."""
    config: dict[str, Any] = _content(find_checkpoint(path, "best"), mapped=True)["state"]["config"]
    return config


def load_last(run_dir: Path) -> tuple[dict[str, Any], str | None]:
    """The state in a run folder's ``last.pt``, or a message and the next best intact file's.

    Those are the ``last.pt`` before it and ``best.pt``. Raises CheckpointError if none can be read.
    """
    last = run_dir / FOLDER / "last.pt"
    files = [file for file in (last, previous_path(last), last.with_name("best.pt")) if file.exists()]
    if not files:
        raise CheckpointError(f"there is no checkpoint in {last.parent.absolute()}. fix: give the folder of a run")
    damaged: list[str] = []
    for file in files:
        try:
            state = load_checkpoint(file)
        except CheckpointError as error:
            damaged.append(str(error).partition(". fix:")[0])
            continue
        if file == last:
            return state, None
        return state, f"resuming from {file}, because {'; '.join(damaged) or f'there is no {last}'}"
    raise CheckpointError(
        f"no checkpoint of {run_dir} can be read: {'; '.join(damaged)}. fix: start a new run, or copy an intact one "
        "there"
    )


def previous_path(path: Path) -> Path:
    """Where ``save_checkpoint`` keeps the file it replaces."""
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def _content(file: Path, mapped: bool = False) -> dict[str, Any]:
    """Content of a checkpoint, digest unchecked; ``mapped`` leaves the tensors on the disk."""
    content = _read(file, mapped)
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("state"), dict):
        raise CheckpointError(
            f"{file} is not a checkpoint of this project. fix: give one that train.py wrote; Darknet .weights go to "
            "model.weights"
        )
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{file} has format version {content.get('version')}, this program reads {VERSION}. fix: use the version "
            "of the program that wrote it"
        )
    return content


def _read(file: Path, mapped: bool) -> Any:
    """Read ``file`` with torch, to the CPU."""
    try:
        with file.open("rb"):
            pass
    except OSError as error:
        raise CheckpointError(f"cannot read {file} ({error.strerror}). fix: check its permissions") from error
    try:
        return torch.load(str(file), map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:
        # Damaged bytes can raise any error. Its text is left out: for a pickle of more than plain
        # data, torch advises to load it anyway.
        raise CheckpointError(
            f"{file} is damaged, or not a checkpoint of this project. fix: {other_files(file)}"
        ) from error


def _free_bytes(path: Path) -> str:
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    return f"{shutil.disk_usage(folder).free:,}"
