"""The folder of a run: rank 0 chooses, creates and claims it, and every rank knows it."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from train_utils.distributed import World, broadcast_text
from train_utils.errors import CheckpointError, TrainError
from train_utils.launch import Job, job_folder_name, read_job
from train_utils.run.checkpoint_files import FOLDER
from train_utils.run.run_claim import Claim, claim_folder, newest_claim
from train_utils.run.whole_files import keep_copy
from train_utils.shell import option


class RunFolder:
    """The folder of a run and, on rank 0, the claim on it."""

    def __init__(self, path: Path, claim: Claim | None) -> None:
        self.path, self._claim = path, claim

    @property
    def ended_after(self) -> int:
        """Epochs at which the run was complete, figures shown; 0 before that and off rank 0."""
        return self._claim.ended_after if self._claim is not None else 0

    @ended_after.setter
    def ended_after(self, epochs: int) -> None:
        if self._claim is not None:
            self._claim.ended_after = epochs

    def check(self) -> None:
        """Raise TrainError, on rank 0, if another run took the folder over."""
        if self._claim is not None:
            self._claim.check()


@contextmanager
def open_run_folder(world: World, name: str, run_dir: str | None, resume: str | None) -> Iterator[RunFolder]:
    """Create and hold the run's folder while the body runs; it is the same on every rank.

    The folder is ``resume``, else ``run_dir``, else ``runs/<name>/slurm-<job id>`` under SLURM,
    ``runs/<name>/torchrun-<run id>`` if torchrun may restart the run, and
    ``runs/<name>/<date_time>`` elsewhere. The last three get a number if they already hold a run.
    ``checkpoints/`` is created inside, and other runs are kept out.

    Raises TrainError on every rank if the folder is not writable, holds another run or is in use.
    """
    claim: Claim | None = None

    def choose() -> None:
        nonlocal claim
        if resume is not None:
            folder = Path(resume).resolve()
            if not folder.is_dir():
                raise TrainError(f"resume={folder} is not a folder. fix: give the folder of a run")
            claim = _claim_named(folder, "resume")
            if not _checkpoints(folder) and _holds_run(folder):
                keep_copy(folder / "metrics.csv")  # the run starts over
        elif run_dir is not None:
            folder = Path(run_dir).resolve()
            taken = _claim_named(folder, "run_dir")
            if _holds_run(folder):
                taken.release(used=False)
                raise TrainError(
                    f"run_dir={folder} already holds a run. fix: {option('resume', folder)} to continue it"
                    " (resume=auto finds it), or another run_dir"
                )
            claim = taken
        else:
            claim = _claim_first_free(_job_folder(name) or _dated(name))

    try:
        on_main(world, choose)
        yield RunFolder(Path(broadcast_text(str(claim.folder) if claim is not None else "")), claim)
    finally:
        if claim is not None:
            claim.release()


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
    found = [(run, *newest_claim(run, place)) for run in sorted(same, key=lambda run: (len(run.name), run.name))]
    # The same start may have moved to another machine, which cannot tell at once that the holder is
    # dead.
    moved = [run for run, claim, held in found if _is_of(claim, place, 3) and not held]
    of_step = [run for run, claim, held in found if _is_of(claim, place, 2) and held is False]
    free = [run for run, _, held in found if held is False]
    return next(iter(moved + of_step + free), None)


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


def _claim_named(folder: Path, key: str) -> Claim:
    """Claim the folder that the option ``key`` names. Raises TrainError if a run holds it."""
    claim = _claim(folder, key, patient=True)
    if isinstance(claim, Claim):
        return claim
    raise TrainError(f"{key}={folder} is in use by {claim}. fix: wait for its end or stop it, or give another run_dir")


def _claim_first_free(base: Path) -> Claim:
    """Claim the first of ``base``, ``base-2``, ... that holds no run and is not in use."""
    for folder in _numbered(base):
        if not _holds_run(folder) and isinstance(claim := _claim(folder, "run_dir", patient=False), Claim):
            if not _holds_run(folder):
                return claim
            claim.release(used=False)  # another run came and went between the two checks
    raise AssertionError("numbers do not end")


def _claim(folder: Path, key: str, patient: bool) -> Claim | str:
    """Create a folder if needed and claim it, or return a description of its holder."""
    _check_writable(folder / FOLDER, key)
    try:
        return claim_folder(folder, read_job(), patient)
    except OSError as error:
        raise _not_writable(folder, key, error) from error


def _is_of(claim: dict[str, Any], place: Job, count: int) -> bool:
    """Whether this job and step made the claim and, if ``count`` is 3, this torchrun run."""
    own = (place.job, place.step, place.run)
    return (claim.get("job"), claim.get("step"), claim.get("run"))[:count] == own[:count]


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
    return list((folder / FOLDER).glob("*.pt"))


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
