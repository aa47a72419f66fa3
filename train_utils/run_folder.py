"""The folder of a run: rank 0 chooses, creates and locks it, and every rank knows it."""

import fcntl
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO

from conf import CheckpointError, TrainError
from conf.cli import launch, run_files
from conf.schema import TrainConfig
from data.remote import is_remote
from train_utils import distributed
from train_utils.report import mirror

LOCK = ".lock"


@contextmanager
def reserve_run_folder(world: distributed.World, config: TrainConfig) -> Iterator[Callable[[], Path]]:
    """Yield a function that returns the run's folder, created and locked, the same on every rank.

    It stays locked while the body runs. That of ``resume`` is locked at once: another run could
    still write a later checkpoint. Else the function makes ``run_dir``, or a new folder below
    runs/<name>/: of a SLURM job, of a torchrun that may restart, or of the time. Raises TrainError
    on every rank if it is not writable, holds another run or is in use.
    """
    resume = config.resume
    is_fetched = is_remote(resume or "")
    folder, lock = Path(), None  # once it is locked, on rank 0

    def choose() -> None:
        nonlocal folder, lock
        if config.run_mirror is not None:
            mirror.refuse_other(config.run_mirror, config.resume)
        if resume is not None and not is_fetched:
            folder, lock = _locked(Path(resume).resolve(), "resume")
            return
        if config.run_dir is None:
            folder, lock = _locked(_new_folder(config.name, launch.job_folder_name(), "run_dir"), "run_dir")
        else:
            given = Path(config.run_dir).resolve()
            _refuse_foreign_files(given)
            folder, lock = _locked(given, "run_dir")
            # A fetch that was cut off has no options yet, and may go on.
            if not is_fetched or (folder / "config.yaml").exists():
                run_files.refuse_run(folder)
        if resume is not None:
            mirror.fetch(resume, folder)

    @cache
    def reserve() -> Path:
        on_main(world, choose)
        return Path(distributed.broadcast_text(str(folder)))

    try:
        if resume is not None:
            reserve()
        yield reserve
    finally:
        if lock is not None:
            with suppress(OSError), lock:
                lock.truncate(0)


def open_out(world: distributed.World, out: str | None, name: str) -> Path:
    """Create the folder ``out``, null: runs/<name>/<time>. TrainError if it has other files."""
    folder = Path(out or "").resolve()

    def make() -> None:
        nonlocal folder
        if out is None:
            folder = _new_folder(name, None, "out")
        elif name == "eval" and (folder / "config.yaml").is_file() and run_files.has_checkpoint(folder):
            _refuse_links(folder, "out")
        else:
            run_files.refuse_existing(folder, "out")
        make_writable(folder, "out")

    on_main(world, make)
    return Path(distributed.broadcast_text(str(folder)))


def on_main(world: distributed.World, function: Callable[[], object]) -> None:
    """Run ``function`` on rank 0; if it fails with an error for users, raise TrainError on all."""
    error = ""
    if world.is_main:
        try:
            function()
        except (TrainError, CheckpointError) as failure:
            error = f"{failure.sentence}\n{failure.fix}"
    if error := distributed.broadcast_text(error):
        raise TrainError(*error.rsplit("\n", 1))


def _locked(folder: Path, key: str) -> tuple[Path, IO[str]]:
    """Create a folder if needed and lock it for this process, until the file is closed.

    The file names the holder. A holder without a file lock counts while its process lives: some
    network disks know no such locks. On another host only a restart of the same job may take a lock
    over, since SLURM and torchrun end a job before. Raises TrainError, naming ``key``, if another
    run holds it.
    """
    _refuse_links(folder, key)
    make_writable(folder / run_files.CHECKPOINTS, key)
    path, ours = folder / LOCK, {"host": os.uname().nodename, "pid": os.getpid(), "job": launch.job_folder_name()}
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    file, holder = os.fdopen(descriptor, "r+", encoding="utf-8", errors="replace"), None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # perhaps by a process of another container, with our number
        holder = ours
    except OSError:
        pass
    is_locked = holder is not None
    with suppress(ValueError, RecursionError):  # of a free lock, one cut by a crash, or no lock of ours
        holder = json.load(file)
    if isinstance(holder, dict) and holder.keys() == ours.keys() and _is_held(holder, ours, is_locked):
        file.close()
        raise TrainError(
            f"{key}={folder} is in use by process {holder['pid']} on host {holder['host']}",
            f"wait for its end or stop it, or give another run_dir; if it is gone, remove {path}",
        )
    file.seek(0)
    file.truncate()
    json.dump(ours, file)
    file.flush()
    return folder, file


def _refuse_foreign_files(folder: Path) -> None:
    """Raise TrainError for what a run would overwrite in a folder that no run has locked before."""
    if (folder / LOCK).exists():
        return
    for pattern in "config.yaml train* *.csv *.html *.npz plots/* checkpoints/*".split():
        for path in folder.glob(pattern):
            run_files.refuse_existing(path, "run_dir")


def _refuse_links(folder: Path, key: str) -> None:
    """Raise TrainError for a link or device where a run writes: behind it may be anything."""
    for pattern in ("*", "checkpoints/*", "plots/*"):
        for path in folder.glob(pattern):
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                kind = "link" if path.is_symlink() else "pipe or device"
                raise TrainError(f"{key}={folder} holds the {kind} {path}", "put a file in its place")


def _is_held(holder: dict[str, object], ours: dict[str, object], is_locked: bool) -> bool:
    if holder["host"] != ours["host"]:
        return ours["job"] is None or holder["job"] != ours["job"]
    if holder["pid"] == ours["pid"]:
        return is_locked
    with suppress(PermissionError):  # of another user, so it lives
        try:
            os.kill(int(str(holder["pid"])), 0)
        except (ProcessLookupError, ValueError, OverflowError):  # it has ended, or was never a process
            return is_locked
    return True


def make_writable(folder: Path, key: str) -> None:
    """Create a folder and write a file there, before any time is spent. Raises TrainError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        fix = "rights to write there" if key == "resume" else f"{key}=<a folder you may write to>"
        raise TrainError(f"the folder {folder} cannot be written ({error.strerror})", fix) from error


def _new_folder(name: str, job: str | None, key: str) -> Path:
    """Create runs/<name>/<job>, or of the time and a multirun's options, for this process alone."""
    job = job or "-".join([time.strftime("%Y-%m-%d_%H-%M-%S"), *launch.VARIED])[:200]  # Linux takes 255
    folder = base = Path("runs", name, job).resolve()
    make_writable(base.parent, key)
    for number in itertools.count(2):
        with suppress(FileExistsError):
            folder.mkdir()
            break
        folder = base.with_name(f"{base.name}-{number}")  # an underscore would denote an array task
    return folder
