"""What a command line leaves open: options of a checkpoint or an earlier run, published weights."""

import hashlib
import os
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from conf import CONF_DIR, ConfigError, launch, run_files
from conf.compose import NOT_COMPOSED, check_values, explain, from_dictionary, plain, to_dictionary, values_of_choice
from conf.errors import CheckpointError
from conf.options import MAY_CHANGE, OF_THE_MACHINE, changed_values, is_covered, option
from conf.schema import TrainConfig
from conf.train_options import is_image_size
from data import DataError, layouts, remote
from data.remote import Place
from models.published import ALIASES, Published


def complete_from_checkpoint(options: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """The options of eval.py, with what YAML and command line leave open from the checkpoint.

    That is the data set, the network, and the image size of the checkpoint's own evaluation.
    """
    is_scored = options.get("detections") is not None
    if is_scored and (options.get("ckpt") is not None or "cfg" in options.get("model", {})):
        raise ConfigError("detections= are scored as they are. fix: leave out ckpt and model")
    options = model_or_checkpoint(options, named)
    if (file := options.get("model_file")) is not None:
        options = of_exported(options, file, options["evaluate"])
        if options["ckpt"] is None and "data" not in options:
            raise ConfigError(f"model_file={file} names no data. fix: add data=..., or ckpt=<its checkpoint>")
    if is_scored:
        if "data" not in options:
            raise ConfigError("detections= are scored against data. fix: add data=...")
        return options
    ckpt = options.get("ckpt")
    if ckpt is None:
        if (options["model"] is None and file is None) or "data" not in options:
            raise ConfigError("nothing to evaluate. fix: ckpt=<run or .pt file>, or model=, model.weights= and data=")
        return options
    saved = config_of_checkpoint(ckpt, named)
    if "data" not in saved and "data" not in options:
        raise ConfigError(f"ckpt={ckpt} was converted and names no data. fix: add data=...")
    if file is None:
        options["evaluate"]["image_size"] = options["evaluate"]["image_size"] or trained_size(saved, ckpt)
    if options["model"] is None:
        del options["model"]
    below = {section: dict(saved[section]) for section in ("data", "model") if section in saved}
    if "data" in below:  # only a command line names a place that is written
        below["data"]["index_dir"] = index_dir_of(options)
    return plain(OmegaConf.merge(below, options))


def model_or_checkpoint(options: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """The options, with ``model`` null unless they name a network: then ``ckpt`` holds one.

    Raises ConfigError for options of a network beside ``ckpt`` or without a network, and
    CheckpointError if ``ckpt`` is not a checkpoint.
    """
    options = with_full_names(options)
    model = options.get("model") or {}
    keys = [key for key in named if key.split(".")[0] == "model"]
    if options.get("ckpt") is not None:
        if keys and model:
            raise ConfigError(f"ckpt and {keys[0]} exclude one another: ckpt holds its network. fix: leave one out")
        config_of_checkpoint(options["ckpt"], named)
    if "cfg" in model:
        return options
    if options.get("ckpt") is None and (keys or model.get("weights") is not None):
        key = keys[0] if keys else "model.weights"
        raise ConfigError(f"{key} does not say which network. fix: model.cfg=<Darknet .cfg>, or model=<zoo's name>")
    return {**options, "model": None}


def model_or_exported(options: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """The same, where ``ckpt`` may also be a file of export.py, which holds its network."""
    ckpt = options.get("ckpt")
    if ckpt is None or Path(ckpt).suffix not in run_files.EXPORTED:
        return model_or_checkpoint(options, named)
    return of_exported(
        {**options, "model": options.get("model") if "cfg" in options.get("model", {}) else None}, ckpt, options
    )


def of_exported(options: dict[str, Any], file: str, detection: Mapping[str, Any]) -> dict[str, Any]:
    """The options for a file of export.py: it runs on the CPU in its own precision.

    ``detection`` has ``precision``. Raises ConfigError for options that a file cannot follow, and
    CheckpointError if there is no such file.
    """
    if Path(file).suffix not in run_files.EXPORTED or not Path(file).is_file():
        known = ", ".join(run_files.EXPORTED)
        raise CheckpointError(f"{file} is not a file of export.py. fix: a path that ends in {known}")
    if options["model"] is not None:
        raise ConfigError(f"{file} and model exclude one another: the file holds its network. fix: leave model out")
    if options["device"] == "cuda" or detection["precision"] not in ("auto", "float32"):
        raise ConfigError(f"{file} runs on the CPU as it was exported. fix: leave out device and precision")
    return {**options, "device": "cpu"}


def complete_export(options: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """The options of export.py, with the data to calibrate and to score on where it needs them."""
    if options["precision"] == "int8" or options["check"] == "ap":
        return complete_from_checkpoint(options, named)
    return {**model_or_checkpoint(options, named), "data": None}


def index_dir_of(options: Mapping[str, Any]) -> str:
    """The folder for indices that a command line names, else the default; never that of a file."""
    named = options.get("data", {}).get("index_dir")
    return str(Path(named or values_of_choice("data", "coco")["index_dir"]).absolute())


def trained_size(saved: dict[str, Any], source: str) -> int | list[int]:
    """The image size at which a checkpoint is scored, as ``image_size``. Raises CheckpointError."""
    saved = checked_config(saved, source)
    size = saved.get("evaluate", {}).get("image_size") or saved.get("train", {}).get("image_size")
    if not is_image_size(size):
        raise CheckpointError(f"{source} is damaged: its config names no image size. fix: use another one")
    pixels: int | list[int] = size
    return pixels


def complete_conversion(options: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """The options of convert_weights; with ``ckpt`` its network, and then ``model`` is refused.

    ``model.weights``, as other programs call it, means ``weights``.
    """
    options = with_full_names(options)
    if options["weights"] is None and options["ckpt"] is None and options["model"]["weights"] is not None:
        options = {**options, "weights": options["model"]["weights"], "model": {**options["model"], "weights": None}}
    if options["ckpt"] is not None and options["weights"] is None:
        if any(key.split(".")[0] == "model" for key in named):
            raise ConfigError("model says nothing about ckpt=, which holds its own network. fix: leave model out")
        return {**options, "model": config_of_checkpoint(options["ckpt"], named).get("model", {})}
    if options["weights"] is not None and "cfg" not in options["model"]:
        raise ConfigError(f"weights={options['weights']} needs its network. fix: model=yolov3-spp or model.cfg=<file>")
    return {**options, "model": {"cfg": "", **options["model"]}}


def with_full_names(options: dict[str, Any], once: bool = True) -> dict[str, Any]:
    """``options`` with runs for their short names in ``ckpt``, ``resume`` and ``model.weights``.

    Raises CheckpointError if no such run exists, and ConfigError for a short name in the last two
    unless it is read only ``once``: later, the newest run may be another, or the training itself.
    """

    def full(key: str, name: str) -> str:
        if (run := run_files.full_name(name)) != name and not once:
            raise ConfigError(f"{key}={name} may be another run after a restart. fix: {key}={run}")
        return run

    if options.get("ckpt") is not None:
        options = {**options, "ckpt": run_files.full_name(options["ckpt"])}
    if options.get("resume") not in (None, "auto"):
        options = {**options, "resume": full("resume", options["resume"])}
    model = options.get("model") or {}
    weights = model.get("weights")
    if weights is None or weights in ALIASES:
        return options
    return {**options, "model": {**model, "weights": full("model.weights", weights)}}


def ask_for_plugins(saved: dict[str, Any], source: str, named: Sequence[str]) -> None:
    """Raise ConfigError if the ``saved`` options have plugins and the command line does not."""
    if saved.get("plugins") and "plugins" not in named:
        names = ",".join(os.path.basename(str(file)) for file in saved["plugins"])
        raise ConfigError(f"{source} needs plugins=[{names}]. fix: give their paths, or plugins=[] to do without")


def config_of_checkpoint(path: str, named: Sequence[str]) -> dict[str, Any]:
    """The options in a checkpoint file or run folder.

    Raises CheckpointError for any other path, and ConfigError if it needs plugins.
    """
    if Path(path).suffix in (".weights", ".cfg"):
        fix = f"fix: {darknet_options(path)} instead of ckpt="
        raise CheckpointError(f"{path} is not a checkpoint: ckpt takes run folders and their .pt files. {fix}")
    run_files.find_checkpoint(Path(path), "best")  # a wrong path costs no import of torch
    peek_config = pkgutil.resolve_name("train_utils.checkpoint:peek_config")  # by name: conf imports no train_utils
    saved = checked_config(peek_config(Path(path)), path)
    ask_for_plugins(saved, f"ckpt={path}", named)
    return saved


def checked_config(saved: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the options ``saved`` in the file ``source`` if they are plain values in sections.

    Raises ConfigError or CheckpointError.
    """
    check_values(saved, source)
    kinds = {key: dict if is_dataclass(kind) else object for key, kind in get_type_hints(TrainConfig).items()}
    for key, kind in (kinds | {"plugins": list}).items():
        if key in saved and not isinstance(saved[key], kind):
            raise CheckpointError(f"{source} is damaged: its option {key} is {saved[key]!r}. fix: use another one")
    return saved


def complete_training(options: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """The options of train.py; with ``resume`` those of that run.

    Paths become absolute, so that the saved options hold in another working folder.
    """
    in_sweep = HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN
    options = with_full_names(options, once=launch.job_folder_name() is None and not in_sweep)
    places: dict[str, dict[str, str]] = {"data": {}, "model": {}}
    for section, key in (("data", "root"), ("data", "index_dir"), ("model", "cfg"), ("model", "weights")):
        place = options.get(section, {}).get(key)
        is_name = {"weights": place in ALIASES, "cfg": not {"/", "."} & set(place or "")}.get(key, False)
        if place is not None and not is_name:
            places[section][key] = str(Path(place).absolute())
    return continue_run(plain(OmegaConf.merge(options, places)), named)


def continue_run(options: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """``options``, or with ``resume`` those of that run with what the command line names.

    ``resume=auto`` means the folder ``run_dir``, else that of this SLURM job or torchrun run with
    these options, else the newest run of this name; a run in ``run_mirror`` wins over one that is
    not mirrored there. Without any, a new run starts. Raises ConfigError if the folder is not a
    run, or if a run with a checkpoint would change options outside MAY_CHANGE, and FetchError.
    """
    options = _with_restarts(options, named)
    places = {key: options.get(key) for key in ("resume", "run_mirror")}
    options = options | {key: at.rstrip("/") for key, at in places.items() if at is not None and remote.is_remote(at)}
    if options.get("resume") == "auto":

        def is_same(folder: Path) -> bool:
            changed = changed_values(read_config(folder), plain(OmegaConf.create(options)))
            return all(is_covered(key, OF_THE_MACHINE) for key in changed)

        run, mirror = run_files.find_run(options["name"], options["run_dir"], is_same), options.get("run_mirror")
        is_here = run is not None and read_config(run).get("run_mirror") == mirror
        if mirror is not None and not is_here and run_files.is_mirrored(mirror):
            options = options | {"resume": mirror}
        elif run is None:
            return options | {"resume": None}
        else:
            options = options | {"resume": str(run), "run_dir": None}
        named = [key for key in named if key not in ("resume", "run_dir")]
    if remote.is_remote(options.get("resume") or ""):
        return _continue_mirrored(options, named)
    if options.get("resume") is None or "run_dir" in named:
        return options  # the schema refuses resume with run_dir
    folder = given = Path(options["resume"])
    if given.parts[-2:] == (run_files.CHECKPOINTS, "last.pt"):
        folder = given.parents[1]
    if given.is_file() and (folder == given or not (folder / "config.yaml").exists()):
        fix = f"fix: the folder of a run, copied as a whole, or a new run with model.weights={given}"
        raise ConfigError(f"resume={given}: a checkpoint without its run folder cannot be resumed. {fix}")
    return _with_changes(read_config(folder), options, named, folder, run_files.has_checkpoint(folder))


def _continue_mirrored(options: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """``continue_run`` of an address: in ``run_dir`` or a new folder, and mirrored there again."""
    address = options["resume"]
    remote.check_bucket(address, "resume")
    before = read_config(address)
    name = str(before.get("name"))
    if not Path("runs", name).resolve().is_relative_to(Path("runs").resolve()):
        raise ConfigError(f"{address}/config.yaml: its name={name} leaves runs/. fix: another run")
    mirror = options["run_mirror"] if "run_mirror" in named else address
    now = _with_changes(before, options, named, address, True)
    return now | {"run_dir": options["run_dir"], "run_mirror": mirror}


def _with_changes(
    before: dict[str, Any], options: dict[str, Any], named: Sequence[str], folder: Place, has_checkpoint: bool
) -> dict[str, Any]:
    """The options ``before`` of a run, with those that the command line names."""
    ask_for_plugins(before, f"resume={folder}", named)
    now, wanted = OmegaConf.create(before), OmegaConf.create(options)
    for key in options if "experiment" in named else named:  # an experiment sets options of all sections
        # A group replaces its section, since another choice may have other keys.
        OmegaConf.update(now, key, OmegaConf.select(wanted, key), merge=False, force_add=True)
    now.run_dir, now.resume, now.data.index_dir = None, str(folder), index_dir_of(options)
    now.run_mirror = options["run_mirror"] if "run_mirror" in named else before.get("run_mirror")
    changed = changed_values(before, plain(now)) if has_checkpoint else {}
    if refused := [f"{key}: {change}" for key, change in changed.items() if not is_covered(key, MAY_CHANGE)]:
        fix = f"fix: leave these options as they were, or start a new run with model.weights={folder}"
        raise ConfigError(f"resume={folder}: the training would change ({'; '.join(refused)}). {fix}")
    return plain(now)


def resumed_options(config: TrainConfig, saved: Mapping[str, Any]) -> TrainConfig:
    """The options of a checkpoint, without ``auto``, with those of ``config`` that may change."""
    source = f"the checkpoint of {config.resume}"
    options, now = OmegaConf.create(checked_config(saved["config"], source)), OmegaConf.create(to_dictionary(config))
    try:
        for key in MAY_CHANGE:
            OmegaConf.update(options, key, OmegaConf.select(now, key), merge=False)
        return from_dictionary(plain(options), TrainConfig)
    except (ValueError, *NOT_COMPOSED) as error:
        raise ConfigError(f"{source} is damaged: {explain(error, TrainConfig)}. fix: use another one") from error


def read_config(folder: Place, key: str = "resume=") -> dict[str, Any]:
    """The options in a run's config.yaml. Raises ConfigError with ``key``, and FetchError."""
    path = f"{folder}/config.yaml" if isinstance(folder, str) else folder / "config.yaml"
    try:
        saved = layouts.load_yaml(path)
    except remote.FetchError:
        raise
    except (DataError, OSError) as error:
        is_missing = isinstance(error, FileNotFoundError)
        problem = f"there is no {path}" if is_missing else str(error).partition(". fix: ")[0]
        raise ConfigError(f"{key}{folder}: {problem}. fix: the folder of a run or its last.pt, last or auto") from error
    if "train" not in checked_config(saved, str(path)) or "name" not in saved.get("data", {}):
        raise ConfigError(f"{path} is incomplete. fix: a copy of it, or a new run")
    return saved


def _with_restarts(options: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """Add ``resume=auto`` if SLURM requeued the job or torchrun may restart the run.

    What the user says about ``resume`` wins. Torchrun's count of restarts is useless here: it may
    still be 0 on nodes that did not fail. The run's id names its folder, so no other run can be
    resumed. Raises ConfigError if torchrun has no id.
    """
    restarts = launch.allowed_restarts()
    if "resume" in named or options.get("resume") is not None or (restarts == 0 and launch.requeues() == 0):
        return options
    if options.get("run_dir") is None and launch.job_folder_name() is None:
        fix = "fix: torchrun --rdzv-id=<a name for this run>, run_dir=<folder>, or --max-restarts=0"
        raise ConfigError(f"torchrun may restart this training {restarts} times and not find its folder again. {fix}")
    return options | {"resume": "auto"}


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


def darknet_options(path: str) -> str:
    """The options for both files of a Darknet network, given one; a .cfg of the zoo by its name."""
    stem = os.path.splitext(os.path.expanduser(path))[0]
    zoo = os.path.basename(stem)
    cfg = zoo if (CONF_DIR / "model" / f"{zoo}.yaml").exists() else f"{stem}.cfg"
    return f"{option('model.cfg', cfg)} {option('model.weights', f'{stem}.weights')}"
