"""What a command line leaves open: options of a checkpoint or an earlier run, published weights."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import OmegaConf

from conf import CONF_DIR, ConfigError
from conf.cli import run_files
from conf.compose import check_values, plain, values_of_choice
from conf.errors import CheckpointError
from conf.options import NO_SCORE, filled, flat, is_covered, option
from conf.schema import TrainConfig
from conf.train_options import is_image_size
from data import DataError, layouts, remote
from data.remote import Place
from models.published import ALIASES

# What predict.py and the demo take from a run where their line leaves it open.
OF_THE_RUN = {"resize": "evaluate.resize", "exif": "data.exif"}
OF_A_FILE = "resize", "confidence", "nms_iou", "max_detections"  # the same of a file of export.py


def complete_from_checkpoint(options: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """The options of eval.py, with what the command line leaves open from the checkpoint.

    That is the data set, the network and ``evaluate``. A ``model_file`` has its own limits.
    """
    if options.get("detections") is not None and (options.get("ckpt") is not None or "cfg" in options.get("model", {})):
        raise ConfigError("detections= are scored as they are. fix: leave out ckpt and model")
    options, saved = _of_run(options, named)
    ckpt, file = options.get("ckpt"), options.get("model_file")
    no_data = {
        "detections": "detections= are scored against data. fix: add data=...",
        "ckpt": f"ckpt={ckpt} was converted and names no data. fix: add data=...",
        "model_file": f"model_file={file} names no data. fix: add data=..., or ckpt=<its checkpoint>",
        "model": "nothing to evaluate. fix: ckpt=<run or .pt file>, or model=, model.weights= and data=",
    }
    scored = next((key for key in no_data if options.get(key) is not None), None)
    if scored is None or not ("data" in options or "data" in saved):
        raise ConfigError(no_data[scored or "model"])
    if file is not None:
        options = of_exported(options, file, named, "evaluate")
    elif ckpt is not None:
        options["evaluate"]["image_size"] = options["evaluate"]["image_size"] or trained_size(saved, ckpt)
    below = {section: dict(saved[section]) for section in ("data", "model") if section in saved}
    if "data" in below:  # only a command line names a place that is written
        below["data"]["index_dir"] = index_dir_of(options)
    above = {key: value for key, value in options.items() if value is not None or key not in below}
    options = plain(OmegaConf.merge(below, above))
    if options.get("out") is not None and "split" in options:
        _refuse_other_evaluation(options)
    return options


def _refuse_other_evaluation(options: Mapping[str, Any]) -> None:
    """Raise ConfigError if ``out`` is a run that another evaluation than its own would rewrite."""
    folder = Path(options["out"])
    if not (folder / "config.yaml").is_file() or not run_files.has_checkpoint(folder):
        return
    of_run, best, ckpt = read_config(folder, "out="), folder / run_files.CHECKPOINTS / "best.pt", options["ckpt"]
    before = flat({"split": "val", **{section: of_run.get(section, {}) for section in ("data", "evaluate")}})
    before["evaluate.image_size"] = trained_size(of_run, str(folder))
    now = flat(options)
    other = [key for key, value in before.items() if now.get(key, value) != value and not is_covered(key, NO_SCORE)]
    other += [key for key in ("model_file", "detections") if options[key] is not None]
    if ckpt is None or run_files.find_checkpoint(Path(ckpt), "best").resolve() != best.resolve():
        other.append("ckpt")
    if other:
        says = "holds a run, and its files are of its own best.pt and options"
        raise ConfigError(f"out={folder} {says} ({', '.join(other)} would differ). fix: out=<other folder>")


def model_or_checkpoint(options: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """The options of predict.py or the demo with a checkpoint, or with a model and its weights."""
    options, saved = _of_run(options, named)
    of_run = flat(saved)
    return filled(options, {key: of_run[name] for key, name in OF_THE_RUN.items() if name in of_run}, named)


def _of_run(options: dict[str, Any], named: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options, with ``model`` null unless they name a network, and those that ``ckpt`` holds.

    ``evaluate`` is that of the run where the command line leaves it open, but the precision of an
    exported file, which runs on the CPU. Raises ConfigError for options of a network beside
    ``ckpt`` or without a network, and CheckpointError if ``ckpt`` is not a checkpoint.
    """
    options, saved = with_full_names(options), dict[str, Any]()
    model = options.get("model") or {}
    keys = [key for key in named if key.split(".")[0] == "model"]
    if options.get("ckpt") is not None:
        if keys and model:
            raise ConfigError(f"ckpt and {keys[0]} exclude one another: ckpt holds its network. fix: leave one out")
        saved = config_of_checkpoint(options["ckpt"], named)
        if "evaluate" in options:
            of_files = ["evaluate.precision"] if "format" in options or options.get("model_file") is not None else []
            evaluate = filled(options["evaluate"], saved.get("evaluate", {}), [*named, *of_files], "evaluate")
            options = {**options, "evaluate": evaluate}
    if "cfg" in model:
        return options, saved
    if options.get("ckpt") is None and (keys or model.get("weights") is not None):
        key = keys[0] if keys else "model.weights"
        raise ConfigError(f"{key} does not say which network. fix: model.cfg=<Darknet .cfg>, or model=<zoo's name>")
    return {**options, "model": None}, saved


def model_or_exported(options: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """The same, where ``ckpt`` may also be a file of export.py, which holds its network."""
    ckpt = options.get("ckpt")
    if ckpt is None or Path(ckpt).suffix not in run_files.EXPORTED:
        return model_or_checkpoint(options, named)
    model = options.get("model") if "cfg" in options.get("model", {}) else None
    return of_exported({**options, "model": model}, ckpt, named)


def of_exported(options: dict[str, Any], file: str, named: Sequence[str], section: str = "") -> dict[str, Any]:
    """The options for a file of export.py: it runs on the CPU in its own precision.

    Where the command line leaves it open, ``resize`` and the limits of suppression are the file's;
    ``section`` has them, or the options themselves. Raises ConfigError for options that a file
    cannot follow, CheckpointError if there is no such file, and ModelError if it cannot be read.
    """
    if Path(file).suffix not in run_files.EXPORTED or not Path(file).is_file():
        known = ", ".join(run_files.EXPORTED)
        raise CheckpointError(f"{file} is not a file of export.py. fix: a path that ends in {known}")
    if options["model"] is not None:
        raise ConfigError(f"{file} and model exclude one another: the file holds its network. fix: leave model out")
    detection = options[section] if section else options
    if options["device"] == "cuda" or detection["precision"] not in ("auto", "float32"):
        raise ConfigError(f"{file} runs on the CPU as it was exported. fix: leave out device and precision")
    from train_utils.inference.open_checkpoint import read_facts  # imports torch

    facts = read_facts(Path(file))
    facts |= facts["suppression"]
    taken = filled(detection, {key: facts[key] for key in OF_A_FILE if key in facts}, named, section)
    return {**options, **({section: taken} if section else taken), "device": "cpu"}


def complete_export(options: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """The options of export.py, with the data to calibrate and to score on where it needs them."""
    if options["precision"] == "int8" or options["check"] == "ap":
        return complete_from_checkpoint(options, named)
    return {**_of_run(options, named)[0], "data": None}


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
    from train_utils.checkpoint import peek_config  # imports torch

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
    train = dict(saved.get("train", {}))
    if "device" in train:  # its earlier place
        device = train.pop("device")
        saved = {**saved, "train": train, "device": device}
    return saved


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
    saved = checked_config(saved, str(path))
    if "train" not in saved or "name" not in saved.get("data", {}):
        raise ConfigError(f"{path} is incomplete. fix: a copy of it, or a new run")
    return saved


def darknet_options(path: str) -> str:
    """The options for both files of a Darknet network, given one; a .cfg of the zoo by its name."""
    stem = os.path.splitext(os.path.expanduser(path))[0]
    zoo = os.path.basename(stem)
    cfg = zoo if (CONF_DIR / "model" / f"{zoo}.yaml").exists() else f"{stem}.cfg"
    return f"{option('model.cfg', cfg)} {option('model.weights', f'{stem}.weights')}"
