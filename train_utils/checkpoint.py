"""Checkpoints: one file of plain data, written atomically and checked bit by bit when read.

The digest is over all of the state, because torch silently reads a tensor with a flipped bit. Files
are only read with ``weights_only=True``, so none can run code.
"""

import errno
import hashlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from conf import CheckpointError, TrainError, first_line
from conf.cli import run_files
from conf.schema import TrainSection
from data.errors import printable
from data.index import UNREADABLE_FIX
from data.progress import LogLine
from models.weights import of_pickle, plain_content
from train_utils.report.mirror import Mirror

FORMAT = "hydra-yolov3-spp checkpoint"
VERSION = 1
OF_THE_SYSTEM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM)  # not of the file
PREVIOUS = "last.previous"  # stem of the file that the newest last.pt replaced

Whole = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Tensors = dict[str, Tensor]
State = dict[str, Any]  # the plain data of a checkpoint, or a part of them


class ConfigState(msgspec.Struct):
    """What a state needs to tell its options, which conf checks."""

    config: State


class Shape(msgspec.Struct):
    """A network without its values."""

    cfg: str
    source: Annotated[str, Meta(pattern=r"^[^\n\r]*\Z")]
    num_classes: Annotated[int, Meta(ge=1, lt=2**31)]
    width: Annotated[float, Meta(gt=0, le=8)]


class NetworkState(ConfigState):
    """What a state needs to serve as a network. A right digest does not vouch for right content."""

    network: Shape
    names: list[str]
    category_ids: list[Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]]
    weights_version: Annotated[list[Annotated[int, Meta(ge=0, lt=1000)]], Meta(min_length=3, max_length=3)]
    epoch: Whole
    step: Whole
    seen: Whole
    ema: Tensors

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.category_ids) == self.network.num_classes:
            raise ValueError("names, category_ids and num_classes differ in number")


class TrainingState(NetworkState):
    """What a resumed training needs; torch checks the states of optimiser and scaler."""

    best: float
    best_epoch: Whole
    evaluated_epoch: Whole
    loss_steps: Whole
    ema_updates: Whole
    world_size: Whole
    metrics: dict[str, float]
    data: State
    model: Tensors
    optimizer: State
    scaler: dict[str, Annotated[float, Meta(ge=0, le=2**32)]]


def save_checkpoint(path: Path, state: State, keep_previous: bool = False) -> None:
    """Write ``state``, as to_plain takes it, to ``path``; after an error the old file is unchanged.

    With ``keep_previous`` the old file stays as ``last.previous.pt``. Raises CheckpointError.
    """
    plain = to_plain(state)
    content = {"format": FORMAT, "version": VERSION, "digest": digest_of(plain), "state": plain}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with run_files.whole_file(path, "wb", path.with_stem(PREVIOUS) if keep_previous else None) as file:
            torch.save(content, file)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError about positions
        raise CheckpointError(
            f"cannot write {path}: {first_line(error)}", "free some space, or choose another run_dir"
        ) from error


def load_checkpoint(path: Path, which: str = "best") -> State:
    """The state in the file, or run folder, ``path``, on the CPU. Raises CheckpointError."""
    file = run_files.find_checkpoint(path, which)
    content = _content(file)
    state: State = content["state"]
    with suppress(RuntimeError, TypeError, ValueError):  # endless lists and numbers, tensors without values
        if digest_of(state) == content.get("digest"):
            return state
    raise CheckpointError(f"{file} is damaged: its content does not match its digest", "use another one")


def check_entries(state: State, source: object, kind: type[msgspec.Struct] = NetworkState) -> State:
    """Return ``state``. Raises CheckpointError, naming ``source``, for an entry of a wrong type."""
    try:
        msgspec.convert(state, kind)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{source} is damaged ({error})", "use another one") from error
    return state


def peek_config(path: Path) -> State:
    """Read only the configuration of the checkpoint that ``load_checkpoint`` would read."""
    content = _content(run_files.find_checkpoint(path, "best"), mapped=True)
    config: State = check_entries(content["state"], path, ConfigState)["config"]
    return config


def load_last(run_dir: Path) -> tuple[State, str | None]:
    """The state in ``last.pt``, else the one before or best.pt, and why. Raises CheckpointError."""
    last = run_dir / run_files.CHECKPOINTS / "last.pt"
    present = [file for file in (last, last.with_stem(PREVIOUS), last.with_stem("best")) if file.exists()]
    if not present:
        raise CheckpointError(f"there is no checkpoint in {last.parent.absolute()}", "give a run's folder")
    damaged: list[str] = []
    why = f"there is no {last}"
    for file in present:
        try:
            return load_checkpoint(file), None if file == last else f"resuming from {file}, because {why}"
        except CheckpointError as error:
            damaged.append(error.sentence)
            why = "; ".join(damaged)
    raise CheckpointError(f"no checkpoint of {run_dir} can be read: {why}", "start a new run")


def continue_from(folder: Path | None) -> tuple[State | None, str | None]:
    """``load_last`` of the resumed run ``folder``; no state before its first checkpoint."""
    if folder is None:
        return None, None
    if (folder / "config.yaml").is_file() and not run_files.has_checkpoint(folder):
        return None, f"{folder} holds no checkpoint yet: its run starts over"
    state, message = load_last(folder)
    if "optimizer" not in state:
        raise CheckpointError(
            f"resume={folder}: its checkpoint holds converted weights, not a training",
            "start a new run with model.weights=<the .pt file>",
        )
    return check_entries(state, f"resume={folder}", TrainingState), message


def _content(file: Path, mapped: bool = False) -> State:
    """The content of a checkpoint, digest unchecked; ``mapped`` leaves the tensors on the disk."""
    mapped = mapped and printable(str(file)) == str(file)  # torch maps no file whose name is not Unicode
    try:
        content = torch.load(str(file), map_location="cpu", weights_only=True, mmap=mapped)
        content = plain_content(content, file.stat().st_size)
    except Exception as error:
        is_short = isinstance(error, OSError) and error.errno in OF_THE_SYSTEM
        if is_short or isinstance(error, MemoryError) or "llocate memory" in str(error):
            raise TrainError(f"{file} cannot be read ({first_line(error)})", UNREADABLE_FIX) from error
        # Damaged bytes can raise any error. Its text is left out: for a pickle of more than plain
        # data, torch advises to load it anyway.
        kind = type(error).__name__
        damaged = f"{file} is damaged, or not a checkpoint of this project ({kind})", "use another one"
        raise CheckpointError(*of_pickle(file, error) or damaged) from error
    about = content if isinstance(content, dict) else {}
    is_own = about.get("format") == FORMAT and about.get("version") == VERSION
    if not is_own or not isinstance(about.get("state"), dict):
        raise CheckpointError(
            f"{file} is not a checkpoint of this project and version",
            "give one that train.py wrote; Darknet .weights go to model.weights",
        )
    return about


def to_plain(value: Any, key: str = "state", copied: bool = False) -> Any:
    """Plain data with tensors detached, contiguous, on the CPU and without unused storage.

    With ``copied`` it shares no memory with ``value``. Raises CheckpointError that names an entry.
    """
    if isinstance(value, Tensor):
        tensor = value.detach().cpu().contiguous()
        # torch would save a view's whole storage.
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        shared = tensor.data_ptr() == value.data_ptr()
        return tensor.clone() if not whole or (copied and shared) else tensor
    # Exact types: reading a subclass, such as a string enum, would need its class.
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, dict):
        plain = dict(value)
        for name in plain:
            plain[name] = to_plain(value[name], f"{key}.{name}", copied)
        return plain
    if type(value) in (list, tuple):
        entries = to_plain(dict(enumerate(value)), key, copied)
        return type(value)(entries.values())
    problem = f"{key} of a checkpoint is a {type(value).__name__}"
    raise CheckpointError(problem, "save tensors, numbers, strings, lists and dicts only")


def digest_of(state: Any) -> str:
    """SHA-256 over the key, type and value of every entry of plain data."""
    sha = hashlib.sha256()

    def walk(value: Any, key: str) -> None:
        if isinstance(value, Tensor):
            sha.update(f"{key}:{value.dtype}{list(value.shape)}\n".encode())
            sha.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(value, (dict, list, tuple)):
            sha.update(f"{key}:{type(value).__name__} {len(value)}\n".encode())
            for name, entry in value.items() if isinstance(value, dict) else enumerate(value):
                walk(entry, f"{key}/{name!r}")
        else:
            sha.update(f"{key}:{value!r}\n".encode())

    walk(state, "")
    return sha.hexdigest()


class CheckpointWriter:
    """Write the checkpoints of the run in ``folder``, and its ``run_mirror``, in the background.

    Training continues after a failure. Without ``options`` none is due within an epoch.
    """

    def __init__(
        self, folder: Path, log_line: LogLine, options: TrainSection | None = None, run_mirror: str | None = None
    ) -> None:
        self._folder = folder / run_files.CHECKPOINTS
        self._log_line = log_line
        self._options = options
        self._last_save = time.monotonic()
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future[None] | None = None  # the last write
        self._best: State | None = None  # until it is in best.pt
        self._mirror = Mirror(folder, run_mirror, log_line) if run_mirror is not None else None

    def is_due(self, step: int) -> bool:
        """Whether this rank asks for a checkpoint within the epoch, after ``step`` steps."""
        if self._options is None:
            return False
        steps = self._options.save_every_steps
        seconds = 60 * self._options.save_every_minutes
        return (steps > 0 and step % steps == 0) or 0 < seconds <= time.monotonic() - self._last_save

    def save(self, state: State | None, is_best: bool = False) -> None:
        """Copy ``state`` and write it to last.pt, and before that to best.pt if ``is_best``.

        A write under way is waited for; a best.pt that failed comes with the next one. Off rank 0,
        without a state, this only restarts the clock. Raises CheckpointError at once if the state
        is not plain data.
        """
        self._last_save = time.monotonic()
        if state is None:
            return
        copy: State = to_plain(state, copied=True)
        try:
            if self.pending is not None:
                self.pending.result()
        except CheckpointError as error:
            self._log_line(f"{error}. Training continues with the previous checkpoint and will try again")
        if is_best:
            self._best = copy
        self.pending = self._pool.submit(self._write, copy)
        if self._mirror is not None:
            self._mirror.follow(self.pending)

    def close(self) -> None:
        """End the threads. Raises CheckpointError if the last write failed."""
        self._pool.shutdown()
        if self._mirror is not None:
            self._mirror.close()
        if self.pending is not None:
            self.pending.result()

    def _write(self, state: State) -> None:
        if self._best is not None:
            save_checkpoint(self._folder / "best.pt", self._best)
            self._best = None
        # A damaged file costs one checkpoint, not the run.
        save_checkpoint(self._folder / "last.pt", state, keep_previous=True)
