"""The one folder of a run: chosen and made by the first process, known to all."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from train_utils.distributed import World, broadcast_text, slurm_job_name
from train_utils.errors import TrainError


def open_run_folder(world: World, name: str, run_dir: str | None, resume: str | None) -> Path:
    """The run's folder, the same on every process: ``resume``, else ``run_dir``, else ``runs/<name>/slurm-<job id>``
    under SLURM and ``runs/<name>/<date_time>`` elsewhere. Makes it, with ``checkpoints/`` inside.

    Raises TrainError on all processes when it cannot be written or already holds another run.
    """

    def prepared(folder: Path, key: str) -> str:
        return str(_writable(folder / "checkpoints", key).parent)

    def choose() -> str:
        if resume is not None:
            return prepared(Path(resume).resolve(), "resume")
        if run_dir is not None:
            return prepared(_fresh(Path(run_dir).resolve()), "run_dir")
        job = slurm_job_name()
        if job is not None:
            return prepared(_fresh(Path("runs", name, f"slurm-{job}").resolve()), "run_dir")
        return prepared(dated_folder(name), "run_dir")

    return Path(on_main(world, choose))


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
    """The text that ``function`` returns on the first process, on every process; its TrainError likewise."""
    text = error = ""
    if world.is_main:
        try:
            text = function()
        except TrainError as failure:
            error = str(failure)
    error = broadcast_text(error)
    if error:
        raise TrainError(error)
    return broadcast_text(text)


def _fresh(folder: Path) -> Path:
    if (folder / "metrics.csv").exists() or (folder / "checkpoints" / "last.pt").exists():
        raise TrainError(
            f"run_dir={folder} already holds a run. fix: resume={folder} to continue it, or another run_dir"
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
