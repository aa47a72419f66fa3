"""The one folder of a run: chosen and made by the first process, known to all."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from train_utils.distributed import World, broadcast_text, job_folder_name
from train_utils.errors import CheckpointError, TrainError


def open_run_folder(world: World, name: str, run_dir: str | None, resume: str | None) -> Path:
    """The run's folder, the same on every process: ``resume``, else ``run_dir``, else ``runs/<name>/slurm-<job id>``
    under SLURM, ``runs/<name>/torchrun-<run id>`` where torchrun may restart the run, and ``runs/<name>/<date_time>``
    elsewhere. Makes it, with ``checkpoints/`` inside.

    Raises TrainError on all processes when it cannot be written or already holds another run.
    """

    def prepared(folder: Path, key: str) -> str:
        return str(_writable(folder / "checkpoints", key).parent)

    def choose() -> str:
        if resume is not None:
            return prepared(Path(resume).resolve(), "resume")
        if run_dir is not None:
            return prepared(_fresh(Path(run_dir).resolve()), "run_dir")
        job = _job_folder(name)
        if job is not None:
            return prepared(_fresh(job), "run_dir")
        return prepared(dated_folder(name), "run_dir")

    return Path(on_main(world, choose))


def find_run(name: str, run_dir: str | None) -> Path | None:
    """The folder that ``resume=auto`` means, where it holds a checkpoint: ``run_dir``, else that of the SLURM job or of
    torchrun's run, else the newest of ``runs/<name>``."""
    own = Path(run_dir).resolve() if run_dir is not None else _job_folder(name)
    folders = [own] if own is not None else Path("runs", name).resolve().glob("*/")
    runs = [folder for folder in folders if (folder / "config.yaml").is_file() and _checkpoints(folder)]
    return max(runs, key=lambda folder: (folder / "config.yaml").stat().st_mtime, default=None)


def _job_folder(name: str) -> Path | None:
    own = job_folder_name()
    return Path("runs", name, own).resolve() if own is not None else None


def _checkpoints(folder: Path) -> list[Path]:
    return list((folder / "checkpoints").glob("*.pt"))


def dated_folder(name: str) -> Path:
    """``runs/<name>/<date_time>``, numbered where it is there already; not made."""
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    folder = Path("runs", name, stamp).resolve()
    count = 1
    while folder.exists():  # another run began in the same second
        count += 1
        folder = folder.with_name(f"{stamp}_{count}")
    return folder


def open_folder(world: World, folder: Path, key: str) -> Path:
    """Make a folder for results on the first process; TrainError on all, naming ``key``, where that cannot write."""
    return Path(on_main(world, lambda: str(_writable(folder.resolve(), key))))


def on_main(world: World, function: Callable[[], str]) -> str:
    """The text that ``function`` returns on the first process, on every process; its error, where that is one for
    users, likewise, as TrainError."""
    text = error = ""
    if world.is_main:
        try:
            text = function()
        except (TrainError, CheckpointError) as failure:
            error = str(failure)
    error = broadcast_text(error)
    if error:
        raise TrainError(error)
    return broadcast_text(text)


def _fresh(folder: Path) -> Path:
    table = folder / "metrics.csv"
    # A run that ended before its first checkpoint left a table without rows, and nothing that could be lost.
    if _checkpoints(folder) or (table.exists() and table.read_text(encoding="utf-8").count("\n") > 1):
        raise TrainError(
            f"run_dir={folder} already holds a run. fix: resume={folder} to continue it (resume=auto by itself), or "
            "another run_dir"
        )
    return folder


def _writable(folder: Path, key: str) -> Path:
    """Make the folder and prove that files can be written there, before anything is spent."""
    probe = folder / ".probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise TrainError(
            f"the folder {folder} cannot be written ({error.strerror}). fix: {key}=<a folder you may write to>"
        ) from error
    return folder
