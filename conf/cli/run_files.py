"""Where runs, checkpoints and published weights are; files that are written whole. No torch."""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from conf.cli import launch
from conf.errors import CheckpointError, TrainError
from data import DataError, remote
from models.published import Published

CHECKPOINTS = "checkpoints"  # a folder in the run folder
EXPORTED = (".onnx", ".pt2", ".xml")  # suffixes of the files of export.py
NAME_A_RUN = "fix: give a run folder or a .pt file of train.py"


def find_checkpoint(path: Path, which: str) -> Path:
    """The checkpoint file ``path``, or that of the run folder ``path``. Raises CheckpointError."""
    if path.suffix in EXPORTED:
        fix = f"fix: ckpt=<the run or .pt file that it was exported from>; eval.py takes model_file={path}"
        raise CheckpointError(f"{path} is not a checkpoint: ckpt takes run folders and their .pt files. {fix}")
    if path.is_file():
        return path
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {path.absolute()}. {NAME_A_RUN}")
    file = path / CHECKPOINTS / f"{which}.pt"
    if not file.is_file():
        raise CheckpointError(f"the folder {path.absolute()} has no {CHECKPOINTS}/{which}.pt. {NAME_A_RUN}")
    return file


def has_checkpoint(folder: Path) -> bool:
    """Whether a run folder has a checkpoint; a run without one starts again from the beginning."""
    return any((folder / CHECKPOINTS).glob("*.pt"))


def is_mirrored(address: str) -> bool:
    """Whether a run is in the folder of a bucket. Raises ValueError and FetchError."""
    remote.check_bucket(address, "run_mirror")
    return bool(remote.sizes_of([f"{address}/config.yaml"])[0] >= 0)


def newest(runs: Iterable[Path]) -> Path | None:
    """The run with a checkpoint whose options were written last."""
    return max(filter(has_checkpoint, runs), key=lambda run: (run / "config.yaml").stat().st_mtime, default=None)


def find_run(name: str, run_dir: str | None, is_same: Callable[[Path], bool]) -> Path | None:
    """Find the folder that ``resume=auto`` means; None without any run.

    That is ``run_dir`` if given. Under SLURM or torchrun it is the first folder of this job or run
    whose options ``is_same`` accepts, elsewhere the newest of ``runs/<name>`` with a checkpoint.
    """
    if run_dir is not None:
        folder = Path(run_dir).resolve()
        return folder if (folder / "config.yaml").is_file() else None
    runs, job = [path.parent for path in Path("runs", name).resolve().glob("*/config.yaml")], launch.job_folder_name()
    if job is None:
        return newest(runs)
    of_job = [run for run in runs if re.fullmatch(rf"{re.escape(job)}(-\d+)?", run.name) and is_same(run)]
    return min(of_job, key=lambda run: (len(run.name), run.name), default=None)


def full_name(name: str) -> str:
    """The newest run with a checkpoint in the folder ``name``, or in ``runs`` for ``last``.

    Other names stay as they are. Raises CheckpointError for ``last`` without any run.
    """
    folder = Path("runs") if name == "last" and not Path(name).exists() else Path(name)
    if (folder / CHECKPOINTS).is_dir():
        return name
    run = newest(file.parent for depth in ("*", "*/*") for file in folder.glob(f"{depth}/config.yaml"))
    if run is None and folder != Path(name):
        raise CheckpointError(f"{name} is the newest run with a checkpoint: {folder.absolute()} has none. {NAME_A_RUN}")
    return str(run or name)


def refuse_existing(path: Path, key: str) -> None:
    """Raise TrainError for a file at ``path``, or any in that folder: no program overwrites one.

    ``key`` is the option that names another place. A link counts, wherever it leads.
    """
    files = (Path(folder, name) for folder, _, names in os.walk(path) for name in sorted(names))
    first = next(files, None) or next(path.iterdir(), None) if path.is_dir() else path
    if first is not None and os.path.lexists(first):
        new = "folder" if path.is_dir() else "file"
        raise TrainError(f"{first} is there already and would be overwritten. fix: {key}=<a new {new}>")


@contextmanager
def whole_file(path: Path, mode: str = "w", previous: Path | None = None) -> Iterator[IO[Any]]:
    """Open a file that takes the name ``path`` once its content is on the disk.

    An earlier file of that name is renamed to ``previous``, if given. After an error, nothing has
    changed. Raises OSError.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    as_text: dict[str, Any] = {} if "b" in mode else {"newline": "", "encoding": "utf-8", "errors": "backslashreplace"}
    temporary.unlink(missing_ok=True)  # a run has one writer: this is a leftover
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), mode, **as_text) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if previous is not None and path.exists():
            os.replace(path, previous)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # so that the rename survives a power cut
    finally:
        os.close(descriptor)


def weights_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where published weights are stored: YOLO_HOME, or a folder in the user's cache."""
    if home := environment.get("YOLO_HOME"):
        return Path(home).expanduser()
    return Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hydra-yolov3-spp"


def fetch_weights(entry: Published) -> Path:
    """The verified file of published weights, downloaded unless it is there.

    Raises the DataError of ``download``, which says where to put the file by hand.
    """
    from data.io import download  # imports numpy

    path = weights_folder() / entry.file_name
    if not path.is_file():
        size = f" ({entry.size / 1e6:.0f} MB)" if entry.size is not None else ""
        print(f"{entry.url}{size} -> {path}", flush=True)
    download(entry.url, path, f"sha1:{entry.sha1}" if entry.sha1 else None, entry.size)
    if entry.sha256 is not None and not hashlib.sha256(path.read_bytes()).hexdigest().startswith(entry.sha256):
        path.unlink()
        raise DataError(f"{entry.url} is damaged, or another file. fix: run the command again")
    return path
