"""What a command line leaves open: options of a run, a checkpoint or a file of export.py."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from conf import CONF_DIR, CheckpointError, ConfigError
from conf.cli import launch, run_files
from conf.cli.resume import continue_run
from conf.compose import plain
from conf.options import NO_SCORE, Options, Words, fill, flat, is_covered, option
from data import remote
from models.cfg import ZOO
from models.config import ALIASES

# What programs take from a run beside its section evaluate, and from a file of export.py.
OF_A_RUN = {"resize": "evaluate.resize", "rect": "evaluate.rect", "exif": "data.exif"}
OF_A_FILE = [*OF_A_RUN, "confidence", "nms_iou", "max_detections"]
NO_DATA = {  # by what is to be scored
    "detections": ("detections= are scored against data", "add data=<data set>"),
    "ckpt": ("ckpt={} was converted and names no data", "add data=<data set>"),
    "model_file": ("model_file={} names no data", "add data=<data set>, or ckpt=<its checkpoint>"),
    "model": ("model= names no data", "add data=<data set>"),
}


def complete_training(options: Options, named: Words) -> Options:
    """The options of train.py; with ``resume`` those of that run.

    Paths become absolute, so that the saved options hold in another working folder. If SLURM has
    requeued the job or torchrun may restart the run, ``resume`` is auto unless the user names it.
    Torchrun's count of restarts is useless here: it may still be 0 on nodes that did not fail. The
    run's id names its folder, so no other run can be resumed. Raises ConfigError if it has no id.
    """
    in_sweep = HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN
    options = run_files.with_full_names(options, once=launch.job_folder_name() is None and not in_sweep)
    given = flat(options)
    names_of = {"data.root": (), "data.index_dir": (), "model.cfg": ZOO, "model.weights": ALIASES}
    for key, names in names_of.items():
        if given.get(key) is not None and given[key] not in names:
            fill(options, {key: str(Path(given[key]).absolute())})
    for key in ("resume", "run_mirror"):
        if options.get(key) is not None and remote.is_remote(options[key]):
            options[key] = options[key].rstrip("/")
    restarts = launch.allowed_restarts()
    if "resume" not in named and options.get("resume") is None and (restarts > 0 or launch.requeues() > 0):
        if options.get("run_dir") is None and launch.job_folder_name() is None:
            says = f"torchrun may restart this training {restarts} times and not find its folder again"
            raise ConfigError(says, "torchrun --rdzv-id=<a name>, run_dir=<folder>, or --max-restarts=0")
        options["resume"] = "auto"
    return options if options.get("resume") is None else continue_run(options, named)


def complete_from_checkpoint(options: Options, named: Words) -> Options:
    """The options of a program with what its command line leaves open, from ``ckpt``.

    That is ``evaluate`` or what the program has of it, and where it scores the data set and the
    network; a file of export.py has its own limits and precision. ``model`` is None unless the
    command line names a network. Raises ConfigError for options that exclude one another or lack
    their data or network, CheckpointError and ModelError if a file is not what it should be.
    """
    options, saved = run_files.with_full_names(options), Options()
    ckpt, file = options.get("ckpt"), options.get("model_file")
    model = options.get("model") or {}
    if options.get("detections") is not None and (ckpt is not None or "cfg" in model):
        raise ConfigError("detections= are scored as they are", "leave out ckpt and model")
    of_model = [key for key in named if key.split(".")[0] == "model"]
    if "evaluate" not in options and Path(ckpt or "").suffix in run_files.EXPORTED:
        ckpt, file = None, ckpt  # predict.py takes either
    if ckpt is not None:
        if of_model and model:
            raise ConfigError(f"ckpt and {of_model[0]} exclude one another: ckpt holds its network", "leave one out")
        saved = config_of_checkpoint(ckpt, named)
        of_run = flat(saved)
        theirs = {key: value for key, value in of_run.items() if key.startswith("evaluate.")}
        if file is not None or "format" in options:  # which runs on the CPU
            theirs.pop("evaluate.precision", None)
        theirs |= {key: of_run[name] for key, name in OF_A_RUN.items() if name in of_run}
        fill(options, theirs, named)
    if "cfg" not in model:
        if ckpt is None and (of_model or model.get("weights") is not None):
            key = of_model[0] if of_model else "model.weights"
            raise ConfigError(f"{key} does not say which network", "model.cfg=<Darknet .cfg>, or model=<zoo's name>")
        options["model"] = None
    if all(one is None for one in (ckpt, file, model.get("weights"), options.get("detections"))):
        raise ConfigError(*run_files.NO_WEIGHTS)
    if file is not None:
        _take_from_exported(options, file, named)
    if "format" in options and options["precision"] != "int8" and options["check"] != "ap":
        options["data"] = None
    elif "evaluate" in options:
        _take_data(options, saved)
    return options


def _take_from_exported(options: Options, file: str, named: Words) -> None:
    """Take from a file of export.py how images become detections; it runs on the CPU as it is."""
    if Path(file).suffix not in run_files.EXPORTED or not Path(file).is_file():
        known = ", ".join(run_files.EXPORTED)
        raise CheckpointError(f"{file} is not a file of export.py", f"a file that is there and ends in {known}")
    if options["model"] is not None:
        raise ConfigError(f"{file} and model exclude one another: the file holds its network", "leave model out")
    precision = options.get("evaluate", options)["precision"]
    if options["device"] == "cuda" or precision not in ("auto", "float32"):
        raise ConfigError(f"{file} runs on the CPU as it was exported", "leave out device and precision")
    from train_utils.inference.open_checkpoint import read_facts  # imports torch

    facts = read_facts(Path(file))
    facts |= facts["suppression"]
    prefix = "evaluate." if "evaluate" in options else ""
    fill(options, {f"{prefix}{key}": facts[key] for key in OF_A_FILE if key in facts}, named)
    options["device"] = "cpu"


def _take_data(options: Options, saved: Options) -> None:
    """Take what scoring needs from the ``saved`` options: data, network and image size."""
    scored = next(key for key in NO_DATA if options.get(key) is not None)
    if not ("data" in options or "data" in saved):
        sentence, fix = NO_DATA[scored]
        raise ConfigError(sentence.format(options.get(scored)), fix)
    if options.get("model_file") is None and options["ckpt"] is not None:
        of_evaluate = options["evaluate"]
        if of_evaluate["image_size"] is None:
            of_evaluate["image_size"] = run_files.trained_size(saved, options["ckpt"])
    if "data" in saved:  # only a command line names a place that is written
        saved["data"]["index_dir"] = run_files.index_dir_of(options)
    for section in ("data", "model"):
        if section in saved:
            options[section] = plain(OmegaConf.merge(saved[section], options.get(section) or {}))
    if options.get("out") is not None and "split" in options:
        _refuse_other_evaluation(options)


def _refuse_other_evaluation(options: Mapping[str, Any]) -> None:
    """Raise ConfigError if ``out`` is a run that another evaluation than its own would rewrite."""
    folder = Path(options["out"])
    if not (folder / "config.yaml").is_file() or not run_files.has_checkpoint(folder):
        return
    of_run, ckpt = run_files.read_config(folder, "out="), options["ckpt"]
    before = flat({"split": "val", **{section: of_run.get(section, {}) for section in ("data", "evaluate")}})
    before["evaluate.image_size"] = run_files.trained_size(of_run, str(folder))
    now = flat(options)
    other = [key for key, value in before.items() if now.get(key, value) != value and not is_covered(key, NO_SCORE)]
    other += [key for key in ("model_file", "detections") if options[key] is not None]
    best = folder / run_files.CHECKPOINTS / "best.pt"
    if ckpt is None or run_files.find_checkpoint(Path(ckpt), "best").resolve() != best.resolve():
        other.append("ckpt")
    if other:
        says = "holds a run, and its files are of its own best.pt and options"
        raise ConfigError(f"out={folder} {says} ({', '.join(other)} would differ)", "out=<other folder>")


def config_of_checkpoint(path: str, named: Words) -> Options:
    """The options in a checkpoint file or run folder.

    Raises CheckpointError for any other path, and ConfigError if it needs plugins.
    """
    stem, suffix = os.path.splitext(path)
    if suffix in (".weights", ".cfg"):
        of_zoo = os.path.basename(stem)
        cfg = of_zoo if (CONF_DIR / "model" / f"{of_zoo}.yaml").exists() else f"{stem}.cfg"
        fix = f"{option('model.cfg', cfg)} {option('model.weights', f'{stem}.weights')} instead of ckpt="
        raise CheckpointError(f"{path} {run_files.NO_CHECKPOINT}", fix)
    run_files.find_checkpoint(Path(path), "best")  # a wrong path costs no import of torch
    from train_utils.checkpoint import peek_config  # imports torch

    saved = run_files.checked_config(peek_config(Path(path)), path)
    run_files.ask_for_plugins(saved, f"ckpt={path}", named)
    return saved


def complete_conversion(options: Options, named: Words) -> Options:
    """The options of convert_weights; with ``ckpt`` its network, and then ``model`` is refused.

    ``model.weights``, as other programs call it, means ``weights``.
    """
    options = run_files.with_full_names(options)
    if options["weights"] is None and options["ckpt"] is None:
        options["weights"], options["model"]["weights"] = options["model"]["weights"], None
    if options["ckpt"] is not None and options["weights"] is None:
        if any(key.split(".")[0] == "model" for key in named):
            raise ConfigError("model says nothing about ckpt=, which holds its own network", "leave model out")
        return {**options, "model": config_of_checkpoint(options["ckpt"], named).get("model", {})}
    if options["weights"] is not None and "cfg" not in options["model"]:
        raise ConfigError(f"weights={options['weights']} needs its network", "model=yolov3-spp or model.cfg=<file>")
    return {**options, "model": {"cfg": "", **options["model"]}}
