"""The folder of a run: rank 0 chooses, creates and locks it, and every rank knows it."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from train_utils.distributed import World, broadcast_text
from train_utils.errors import CheckpointError, TrainError
from train_utils.files import CHECKPOINTS, keep_copy
from train_utils.launch import Job, job_folder_name, read_job
from train_utils.options import option

LOCK = ".lock"


@contextmanager
def open_run_folder(world: World, name: str, run_dir: str | None, resume: str | None) -> Iterator[Path]:
    """Create and lock the run's folder while the body runs; it is the same on every rank.

    The folder is ``resume``, else ``run_dir``, else a new one: ``runs/<name>/slurm-<job id>`` under
    SLURM, ``runs/<name>/torchrun-<run id>`` if torchrun may restart the run, and
    ``runs/<name>/<date_time>`` elsewhere, with a number if it exists. ``checkpoints/`` is created
    inside, and other runs are kept out.

    Raises TrainError on every rank if the folder is not writable, holds another run or is in use.
    """
    folder: Path | None = None

    def choose() -> None:
        nonlocal folder
        if resume is not None:
            path = Path(resume).resolve()
            if not path.is_dir():
                raise TrainError(f"resume={path} is not a folder. fix: give the folder of a run")
            folder = _locked(path, "resume")
            if not _checkpoints(path) and _holds_run(path):
                keep_copy(path / "metrics.csv")  # the run starts over
        elif run_dir is not None:
            folder = _locked(path := Path(run_dir).resolve(), "run_dir")
            if _holds_run(path):
                raise TrainError(
                    f"run_dir={path} already holds a run. fix: {option('resume', path)} to continue it"
                    " (resume=auto finds it), or another run_dir"
                )
        else:
            folder = _locked(_new_folder(_job_folder(name) or _dated(name)), "run_dir")

    try:
        on_main(world, choose)
        yield Path(broadcast_text(str(folder or "")))
    finally:
        if folder is not None:
            _write_lock(folder / LOCK, read_job(), pid=0)


def find_run(name: str, run_dir: str | None, is_same: Callable[[Path], bool]) -> Path | None:
    """Find the folder that ``resume=auto`` means; None if there is no run.

    It is ``run_dir`` if given. Under SLURM or torchrun it is the folder of this job or run whose
    options ``is_same`` accepts: that of this process's job step if there are several, else one that
    nobody holds. Elsewhere it is the newest of ``runs/<name>`` with a checkpoint.
    """
    if run_dir is not None:
        own = Path(run_dir).resolve()
        return own if _config(own).is_file() else None
    base, place = _job_folder(name), read_job()
    if base is None:
        runs = [run for run in Path("runs", name).resolve().glob("*/") if _config(run).is_file() and _checkpoints(run)]
        return max(runs, key=lambda run: _config(run).stat().st_mtime, default=None)
    ours = [run for run in base.parent.glob(f"{base.name}*/") if re.fullmatch(r"(-\d+)?", run.name[len(base.name) :])]
    same = [run for run in ours if _config(run).is_file() and is_same(run)]
    locks = [(run, _read_lock(run / LOCK)) for run in sorted(same, key=lambda run: (len(run.name), run.name))]
    free = [(run, lock) for run, lock in locks if not _is_held(lock, place)]
    of_step = [run for run, lock in free if (lock.get("job"), lock.get("step")) == (place.job, place.step)]
    return next(iter([*of_step, *(run for run, _ in free)]), None)


def dated_folder(name: str) -> Path:
    """``runs/<name>/<date_time>``, numbered if that exists; not created."""
    return next(folder for folder in _numbered(_dated(name)) if not folder.exists())


def open_folder(world: World, folder: Path, key: str) -> Path:
    """Create a folder for results on rank 0; TrainError, naming ``key``, on all if not writable."""
    folder = Path(broadcast_text(str(folder.resolve())))
    on_main(world, lambda: _check_writable(folder, key))
    return folder


def on_main(world: World, function: Callable[[], object]) -> None:
    """Run ``function`` on rank 0; if it fails with an error for users, raise TrainError on all."""
    error = ""
    if world.is_main:
        try:
            function()
        except (TrainError, CheckpointError) as failure:
            error = str(failure)
    if error := broadcast_text(error):
        raise TrainError(error)


def _locked(folder: Path, key: str) -> Path:
    """Create a folder if needed and lock it for this process.

    A lock is held while its process lives. On another host only a restart of the same job may take
    it over. Raises TrainError, naming ``key``, if another run holds it or it is not writable.
    """
    _check_writable(folder / CHECKPOINTS, key)
    path, job = folder / LOCK, read_job()
    with path.open("a") as guard:
        with suppress(OSError):  # some network disks know no such locks
            fcntl.flock(guard, fcntl.LOCK_EX)  # of two processes that find a dead holder, one goes first
        lock = _read_lock(path)
        if not _is_held(lock, job):
            _write_lock(path, job, os.getpid())
            return folder
    gone = f"; if it is gone, remove {path}" if lock["host"] != platform.node() else ""
    where = [f"host {lock['host']}", f"SLURM job {lock['job']}" if lock["job"] else ""]
    where += [f"step {lock['step']}" if lock["step"] else "", f"since {lock['since']}"]
    holder = f"process {lock['pid']} ({', '.join(filter(None, where))})"
    raise TrainError(
        f"{key}={folder} is in use by {holder}. fix: wait for its end or stop it{gone}, or give another run_dir"
    )


def _is_held(lock: dict[str, Any], job: Job) -> bool:
    if not lock.get("pid"):
        return False
    if lock["host"] == platform.node():
        return bool(lock["born"] == _born(lock["pid"]))
    # SLURM and torchrun end a job before they restart it.
    requeued = job.job and lock["job"] == job.job and lock["restarts"] < job.restarts
    return not (requeued or (job.run and lock["run"] == job.run))


def _read_lock(path: Path) -> dict[str, Any]:
    """Content of a lock file; {} if there is none, or one cut by a crash."""
    with suppress(FileNotFoundError, ValueError):
        lock = json.loads(path.read_text(encoding="utf-8"))
        return lock if isinstance(lock, dict) else {}
    return {}


def _write_lock(path: Path, job: Job, pid: int) -> None:
    """Lock for the process ``pid`` of this host; 0 frees it, and the file says whose it was."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    lock = {"host": platform.node(), "pid": pid, "born": _born(pid), "since": since, **job._asdict()}
    with suppress(OSError):  # a full disk must not end a run; the end of this process frees the folder
        path.write_text(json.dumps(lock), encoding="utf-8")


def _born(pid: int) -> str | None:
    """Start of a process of this host in clock ticks; "" if hidden, None if it ended."""
    if Path("/proc/self/stat").exists():
        with suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return None if fields[0] in "ZX" else fields[19]
        return None
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return ""
    return None


def _new_folder(base: Path) -> Path:
    """Make the first of ``base``, ``base-2``, ... that does not exist."""
    for folder in _numbered(base):
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise _not_writable(folder, "run_dir", error) from error
        return folder
    raise AssertionError("numbers do not end")


def _job_folder(name: str) -> Path | None:
    own = job_folder_name()
    return Path("runs", name, own).resolve() if own is not None else None


def _dated(name: str) -> Path:
    return Path("runs", name, time.strftime("%Y-%m-%d_%H-%M-%S")).resolve()


def _numbered(base: Path) -> Iterator[Path]:
    yield base
    for number in itertools.count(2):
        yield base.with_name(f"{base.name}-{number}")  # an underscore would denote an array task


def _config(folder: Path) -> Path:
    return folder / "config.yaml"


def _checkpoints(folder: Path) -> list[Path]:
    return list((folder / CHECKPOINTS).glob("*.pt"))


def _holds_run(folder: Path) -> bool:
    table = folder / "metrics.csv"
    # A run that ended before its first checkpoint left a table without rows: nothing to lose.
    return bool(_checkpoints(folder)) or (table.exists() and table.read_text(encoding="utf-8").count("\n") > 1)


def _check_writable(folder: Path, key: str) -> None:
    """Create the folder and write a file there, before any time is spent. Raises TrainError."""
    probe = folder / ".probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink(missing_ok=True)  # another process may have removed it
    except OSError as error:
        raise _not_writable(folder, key, error) from error


def _not_writable(folder: Path, key: str, error: OSError) -> TrainError:
    return TrainError(
        f"the folder {folder} cannot be written ({error.strerror}). fix: {key}=<a folder you may write to>"
    )
