"""The one folder of a run: chosen, made and claimed by the first process, known to all."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from train_utils.distributed import World, broadcast_text, job_folder_name, job_place
from train_utils.errors import CheckpointError, TrainError
from train_utils.launch.environment import JobPlace
from train_utils.run.checkpoint import FOLDER
from train_utils.run.run_claim import Claim, claim_folder, is_held, last_claim
from train_utils.run.whole_files import keep_copy
from train_utils.shell import option


class RunFolder:
    """The folder of a run and, on the first process, its claim on it."""

    def __init__(self, path: Path, claim: Claim | None) -> None:
        self.path, self._claim = path, claim

    @property
    def ended_after(self) -> int:
        """The epochs after which the training in the folder was over and had shown its figures; 0 where it was not, and
        on all processes but the first."""
        return self._claim.ended_after if self._claim is not None else 0

    @ended_after.setter
    def ended_after(self, epochs: int) -> None:
        if self._claim is not None:
            self._claim.ended_after = epochs

    def check(self) -> None:
        """Raise TrainError, on the first process, where another run took the folder over."""
        if self._claim is not None:
            self._claim.check()


@contextmanager
def open_run_folder(world: World, name: str, run_dir: str | None, resume: str | None) -> Iterator[RunFolder]:
    """The run's folder while the body runs, the same on every process: ``resume``, else ``run_dir``, else
    ``runs/<name>/slurm-<job id>`` under SLURM, ``runs/<name>/torchrun-<run id>`` where torchrun may restart the run,
    and ``runs/<name>/<date_time>`` elsewhere; these three are numbered where one holds a run already. Makes it, with
    ``checkpoints/`` inside, and keeps other runs out of it.

    Raises TrainError on all processes when it cannot be written, already holds another run or is in use.
    """
    claims: list[Claim] = []

    def choose() -> str:
        given = resume if resume is not None else run_dir
        if given is None:
            claims.append(_first_free(_base(name)))
        else:
            key, folder = "run_dir" if resume is None else "resume", Path(given).resolve()
            if resume is not None and not folder.is_dir():
                raise TrainError(f"resume={folder} is no folder. fix: name the folder of a run")
            claim = _claim(folder, key, patient=True)
            if isinstance(claim, str):
                raise TrainError(
                    f"{key}={folder} is in use by {claim}. fix: wait for its end or stop it first, or another run_dir"
                )
            if resume is None and _holds_run(folder):
                claim.release(used=False)
                raise TrainError(
                    f"run_dir={folder} already holds a run. fix: {option('resume', folder)} to continue it"
                    " (resume=auto by itself), or another run_dir"
                )
            claims.append(claim)
            if resume is not None and not _checkpoints(folder) and _holds_run(folder):
                keep_copy(folder / "metrics.csv")  # the run begins again
        return str(claims[0].folder)

    try:
        yield RunFolder(Path(on_main(world, choose)), claims[0] if claims else None)
    finally:
        for claim in claims:
            claim.release()


def find_run(name: str, run_dir: str | None, is_same: Callable[[Path], bool]) -> Path | None:
    """The folder that ``resume=auto`` means: ``run_dir``; else that of the SLURM job or of torchrun's run whose options
    ``is_same`` accepts; else, where there is neither, the newest of ``runs/<name>`` with a checkpoint. None where there
    is no run.

    Of several with the same options it is that of this process's step of the job, else one that nobody holds.
    """
    if run_dir is not None:
        own = Path(run_dir).resolve()
        return own if _config(own).is_file() else None
    base, place = _job_folder(name), job_place()
    if base is None:
        runs = [run for run in Path("runs", name).resolve().glob("*/") if _config(run).is_file() and _checkpoints(run)]
        return max(runs, key=lambda run: _config(run).stat().st_mtime, default=None)
    ours = [run for run in base.parent.glob(f"{base.name}*/") if re.fullmatch(r"(-\d+)?", run.name[len(base.name) :])]
    same = [run for run in sorted(ours, key=lambda run: (len(run.name), run.name)) if _config(run).is_file()]
    same = [run for run in same if is_same(run)]
    found = [(run, last_claim(run), is_held(run, place)) for run in same]
    # The same start may have moved to another machine, from where no one can tell at once that its holder is dead.
    moved = [run for run, claim, held in found if _is_of(claim, place, 3) and not held]
    of_step = [run for run, claim, held in found if _is_of(claim, place, 2) and held is False]
    free = [run for run, _, held in found if held is False]
    return next(iter(moved + of_step + free), None)


def _is_of(claim: dict[str, Any], place: JobPlace, count: int) -> bool:
    """Whether a claim was made by this job, step and, where three count, run of torchrun."""
    own = (place.job, place.step, place.run)
    return (claim.get("job"), claim.get("step"), claim.get("run"))[:count] == own[:count]


def _base(name: str) -> Path:
    return _job_folder(name) or Path("runs", name, time.strftime("%Y-%m-%d_%H-%M-%S")).resolve()


def _job_folder(name: str) -> Path | None:
    own = job_folder_name()
    return Path("runs", name, own).resolve() if own is not None else None


def _config(folder: Path) -> Path:
    return folder / "config.yaml"


def _checkpoints(folder: Path) -> list[Path]:
    return list((folder / FOLDER).glob("*.pt"))


def _first_free(base: Path) -> Claim:
    """A claim on the first of ``base``, ``base-2``, ... that holds no run and that nobody trains into."""
    for folder in _numbered(base):
        if _holds_run(folder):
            continue
        claim = _claim(folder, "run_dir", patient=False)
        if isinstance(claim, str):
            continue
        if not _holds_run(folder):
            return claim
        claim.release(used=False)  # another run came and went between the two looks
    raise AssertionError("numbers do not end")


def _numbered(base: Path) -> Iterator[Path]:
    yield base
    for number in itertools.count(2):
        yield base.with_name(f"{base.name}-{number}")  # an underscore would make a task of a job array of it


def _claim(folder: Path, key: str, patient: bool) -> Claim | str:
    """A claim on a folder, made where it is not there; a few words about the holder where another run has it."""
    _writable(folder / FOLDER, key)
    try:
        return claim_folder(folder, job_place(), patient)
    except OSError as error:
        raise _not_writable(folder, key, error) from error


def dated_folder(name: str) -> Path:
    """``runs/<name>/<date_time>``, numbered where it is there already; not made."""
    base = Path("runs", name, time.strftime("%Y-%m-%d_%H-%M-%S")).resolve()
    return next(folder for folder in _numbered(base) if not folder.exists())


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


def _holds_run(folder: Path) -> bool:
    table = folder / "metrics.csv"
    # A run that ended before its first checkpoint left a table without rows, and nothing that could be lost.
    return bool(_checkpoints(folder)) or (table.exists() and table.read_text(encoding="utf-8").count("\n") > 1)


def _writable(folder: Path, key: str) -> Path:
    """Make the folder and prove that files can be written there, before anything is spent."""
    probe = folder / ".probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink(missing_ok=True)  # another process may have
    except OSError as error:
        raise _not_writable(folder, key, error) from error
    return folder


def _not_writable(folder: Path, key: str, error: OSError) -> TrainError:
    return TrainError(
        f"the folder {folder} cannot be written ({error.strerror}). fix: {key}=<a folder you may write to>"
    )
