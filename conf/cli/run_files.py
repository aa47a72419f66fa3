"""Where runs and published weights are, the options in runs, files that are written whole."""

import hashlib
import itertools
import os
import pickletools
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import IO, Any, cast, get_type_hints

from conf import CheckpointError, ConfigError, TrainError
from conf.cli.launch import read_launch
from conf.compose import check_values, values_of_choice
from conf.options import Options, Words, at_home, fill, flat, option
from conf.schema import TrainConfig, is_image_size
from data import DataError, layouts, remote
from data.output import STDOUT
from data.remote import Place
from models.config import ALIASES, Published

CHECKPOINTS = "checkpoints"  # a folder in the run folder
SUFFIXES = {"onnx": ".onnx", "openvino": ".xml", "torch": ".pt2"}  # of the files of export.py, by format
EXPORTED = tuple(SUFFIXES.values())
NO_CHECKPOINT = "is not a checkpoint: ckpt takes run folders and their .pt files"
NO_WEIGHTS = "no weights are given", "ckpt=<run folder or .pt file>, or model=<network> model.weights=<file>"
NAME_A_RUN = "give a run folder or a .pt file of train.py"


def find_checkpoint(path: Path, which: str) -> Path:
    """The checkpoint file ``path``, or that of the run folder ``path``. Raises CheckpointError."""
    if path.suffix in EXPORTED:
        fix = f"ckpt=<the run or .pt file that it was exported from>; eval.py takes model_file={path}"
        raise CheckpointError(f"{path} {NO_CHECKPOINT}", fix)
    if path.is_file():
        return path
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {path.absolute()}", NAME_A_RUN)
    file = path / CHECKPOINTS / f"{which}.pt"
    if not file.is_file():
        raise CheckpointError(f"the folder {path.absolute()} has no {CHECKPOINTS}/{which}.pt", NAME_A_RUN)
    return file


def has_checkpoint(folder: Path) -> bool:
    """Whether a run folder has a checkpoint; a run without one starts again from the beginning."""
    return any((folder / CHECKPOINTS).glob("*.pt"))


def is_mirrored(address: str) -> bool:
    """Whether a run is in the folder of a bucket. Raises ValueError and FetchError."""
    remote.check_bucket(address, "run_mirror")
    return bool(remote.sizes_of([f"{address}/config.yaml"])[0] >= 0)


def progress_of(run: Place) -> tuple[int, int]:
    """Epoch and step in a run's last checkpoint, also in a bucket; zeros without a whole one.

    It unpickles nothing: a key of the state is followed by its number. Raises FetchError.
    """
    for stem in ("last", "last.previous"):
        path = f"{run}/{CHECKPOINTS}/{stem}.pt"
        try:
            with remote.opened(path) if remote.is_remote(path) else open(path, "rb") as file:
                content = zipfile.ZipFile(file)
                name = next(name for name in content.namelist() if name.endswith("/data.pkl"))
                pickled = content.read(name)
            values = [value for op, value, _ in pickletools.genops(pickled) if "PUT" not in op.name]
            pairs = [pair for pair in itertools.pairwise(values) if type(pair[1]) is int]
            found = dict(reversed([pair for pair in pairs if pair[0] in ("epoch", "step")]))  # the first ones
            return found["epoch"], found["step"]
        except remote.FetchError:
            raise
        except (FileNotFoundError, zipfile.BadZipFile, StopIteration, ValueError, KeyError):
            continue
    return 0, 0


def newest(runs: Iterable[Path]) -> Path | None:
    """The run with a checkpoint whose options were written last."""
    return max(filter(has_checkpoint, runs), key=lambda run: (run / "config.yaml").stat().st_mtime, default=None)


def full_name(name: str) -> str:
    """The newest run with a checkpoint in the folder ``name``, or in ``runs`` for ``last``.

    Other names stay as they are. Raises CheckpointError for ``last`` without any run.
    """
    folder = Path("runs") if name == "last" and not Path(name).exists() else Path(name)
    if (folder / CHECKPOINTS).is_dir():
        return name
    run = newest(file.parent for depth in ("*", "*/*") for file in folder.glob(f"{depth}/config.yaml"))
    if run is None and folder != Path(name):
        raise CheckpointError(f"{name} is the newest run with a checkpoint: {folder.absolute()} has none", NAME_A_RUN)
    return str(run or name)


def with_full_names(options: Options, once: bool = True) -> Options:
    """Put runs for their short names in ``ckpt``, ``resume`` and ``model.weights``.

    Raises CheckpointError if no such run exists, and ConfigError for a short name in the last two
    unless it is read only ``once``: later, the newest run may be another, or the training itself.
    """
    given = flat(options)
    for key, kept in (("ckpt", ()), ("resume", ("auto",)), ("model.weights", ALIASES)):
        name = given.get(key)
        if name is not None and name not in kept:
            run = full_name(name)
            if run != name and key != "ckpt" and not once:
                raise ConfigError(f"{key}={name} may be another run later", f"{key}={run}")
            fill(options, {key: run})
    return options


def ask_for_plugins(saved: Mapping[str, Any], source: str, named: Words) -> None:
    """Raise ConfigError if the ``saved`` options have plugins and the command line does not."""
    if saved.get("plugins") and "plugins" not in named:
        names = ",".join(map(os.path.basename, map(str, saved["plugins"])))
        raise ConfigError(f"{source} needs plugins=[{names}]", "give their paths, or plugins=[] to do without")


def checked_config(saved: Options, source: str) -> Options:
    """Return the options ``saved`` in the file ``source`` if they are plain values in sections.

    Raises ConfigError or CheckpointError.
    """
    check_values(saved, source)
    for key, kind in get_type_hints(TrainConfig).items():
        wanted = dict if is_dataclass(kind) else list if key == "plugins" else object
        if key in saved and not isinstance(saved[key], wanted):
            raise CheckpointError(f"{source} is damaged: its option {key} is {saved[key]!r}", "use another one")
    if "device" in saved.get("train", {}):  # its earlier place
        train = dict(saved["train"])
        saved = {**saved, "device": train.pop("device"), "train": train}
    return saved


def trained_size(saved: Options, source: str) -> int | list[int]:
    """The image size at which a checkpoint is scored, as ``image_size``. Raises CheckpointError."""
    saved = checked_config(saved, source)
    size = saved.get("evaluate", {}).get("image_size") or saved.get("train", {}).get("image_size")
    if not is_image_size(size):
        raise CheckpointError(f"{source} is damaged: its config names no image size", "use another one")
    return cast("int | list[int]", size)


def read_config(folder: Place, key: str = "resume=") -> Options:
    """The options in a run's config.yaml. Raises ConfigError with ``key``, and FetchError."""
    path = f"{folder}/config.yaml" if isinstance(folder, str) else folder / "config.yaml"
    try:
        saved = checked_config(layouts.load_yaml(path), str(path))
    except remote.FetchError:
        raise
    except (DataError, OSError) as error:
        problem = getattr(error, "sentence", error)
        if isinstance(error, FileNotFoundError):
            problem = f"there is no {path}"
        fix = "the folder of a run"
        if key == "resume=":
            fix += " or its last.pt, last or auto; the first command if it saved nothing"
        raise ConfigError(f"{key}{folder}: {problem}", fix) from error
    if "train" not in saved or "name" not in saved.get("data", {}):
        raise ConfigError(f"{path} is incomplete", "a copy of it, or a new run")
    return saved


def index_dir_of(options: Mapping[str, Any]) -> str:
    """The folder for indices that a command line names, else the default; never that of a file."""
    named = options.get("data", {}).get("index_dir")
    return str(Path(named or values_of_choice("data", "coco")["index_dir"]).absolute())


def refuse_existing(path: Path, key: str) -> None:
    """Raise TrainError for a file at ``path``, or any in that folder: no program overwrites one.

    ``key`` is the option that names another place. A link counts, wherever it leads.
    """
    files = (Path(folder, name) for folder, _, names in os.walk(path) for name in sorted(names))
    first = next(files, None) or next(path.iterdir(), None) if path.is_dir() else path
    if first is not None and os.path.lexists(first):
        raise TrainError(f"{first} is there already and would be overwritten", f"{key}=<a new path>")


def exported_beside(weights: str, form: str) -> Path:
    """The file that export.py writes in the format ``form`` without ``out``."""
    source = Path(weights)
    return (source / CHECKPOINTS / "best" if source.is_dir() else source).with_suffix(SUFFIXES[form])


def refuse_overwriting(options: Mapping[str, Any]) -> None:
    """Raise TrainError, before torch is imported, for what is where a program would write."""
    out = options.get("out")
    if out is None and options.get("ckpt") and "format" in options:
        ckpt = full_name(options["ckpt"])
        is_checkpoint = os.path.isdir(ckpt) or ckpt.endswith(".pt")
        out = str(exported_beside(ckpt, options["format"])) if is_checkpoint else None
    if out in (None, options.get("weights")):  # convert_weights says more of what would replace its source
        return
    # eval.py writes into a run. A rank may find what another one has just made.
    if not has_checkpoint(Path(out)) and read_launch().launcher == "none":
        refuse_existing(Path(out), "out")


def refuse_run(folder: Path) -> None:
    """Raise TrainError if ``folder``, of ``run_dir``, has a checkpoint."""
    if has_checkpoint(folder):
        fix = f"{option('resume', folder)} to continue it (resume=auto finds it), or another run_dir"
        raise TrainError(f"run_dir={folder} already holds a run", fix)


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
        return Path(at_home(home))
    return Path(at_home(environment.get("XDG_CACHE_HOME") or "~/.cache")) / "hydra-yolov3-spp"


def fetch_weights(entry: Published) -> Path:
    """The verified file of published weights, downloaded unless it is there. Raises DataError."""
    from data.io import download  # imports numpy

    path = weights_folder() / entry.file_name
    if not path.is_file():
        size = f" ({entry.size / 1e6:.0f} MB)" if entry.size is not None else ""
        STDOUT.write(f"{entry.url}{size} -> {path}\n")
    download(entry.url, path, f"sha1:{entry.sha1}" if entry.sha1 else None, entry.size)
    if entry.sha256 is not None:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if not digest.startswith(entry.sha256):
            path.unlink()
            raise DataError(f"{entry.url} is damaged, or another file", "run the command again")
    return path
