"""What a command line leaves open: the network, a checkpoint's values, the files of weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf import ConfigError
from conf.entry import layered
from conf.file_choices import check_values
from conf.messages import darknet_options
from data.files import download
from models.config import ModelConfig
from models.published import Published
from train_utils.errors import CheckpointError
from train_utils.files import find_checkpoint

if TYPE_CHECKING:
    from train_utils.distributed import World


def complete_from_checkpoint(options: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """The options of eval.py; the checkpoint fills in what YAML and command line leave open."""
    alone = ConfigError("detections= are scored as they are. fix: leave out ckpt and model")
    if options.get("detections") is not None and options.get("ckpt") is not None:
        raise alone  # before the checkpoint is read, which may be any file
    options = model_or_checkpoint(options, named)
    if options.get("detections") is not None:
        if options["model"] is not None:
            raise alone
        if "data" not in options:
            raise ConfigError("detections= are scored against data. fix: add data=...")
        return options
    if options["model"] is None:
        del options["model"]
    if options.get("ckpt") is not None:
        return _over_checkpoint(options)
    if "model" not in options or "data" not in options:
        raise ConfigError(
            "nothing to evaluate. fix: ckpt=<run folder or .pt file>, or model=, model.weights= and data="
        )
    return options


def model_or_checkpoint(options: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """The options with ``model`` null if no network is named: then ``ckpt`` holds one.

    Raises ConfigError if options of a network stand beside ``ckpt``, or without a network;
    CheckpointError if ``ckpt`` is none.
    """
    model = options.get("model") or {}
    keys = [key for key in named if key.split(".")[0] == "model"]
    if options.get("ckpt") is not None:
        if keys and model:
            raise ConfigError(
                f"ckpt and {keys[0]} exclude one another: a checkpoint holds its network. fix: leave one out"
            )
        ask_for_plugins(config_of_checkpoint(options["ckpt"]), f"ckpt={options['ckpt']}", named)
    if "cfg" in model:
        return options
    if options.get("ckpt") is None and (keys or model.get("weights") is not None):
        key = keys[0] if keys else "model.weights"
        raise ConfigError(
            f"{key} does not say which network. fix: model.cfg=<Darknet .cfg>, or model=<name of the zoo>"
        )
    return {**options, "model": None}


def _over_checkpoint(options: dict[str, Any]) -> dict[str, Any]:
    """``options`` over the data set and the network of the checkpoint.

    Without an image size in ``options`` it is that of the checkpoint's evaluation.
    """
    saved = config_of_checkpoint(options["ckpt"])
    image_size = options["evaluate"]["image_size"] or saved["evaluate"]["image_size"] or saved["train"]["image_size"]
    options["evaluate"]["image_size"] = image_size
    if "data" not in saved and "data" not in options:
        raise ConfigError(f"ckpt={options['ckpt']} was converted and names no data. fix: add data=...")
    return layered({section: saved[section] for section in ("data", "model") if section in saved}, options)


def complete_conversion(options: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """The options of convert_weights with the network of ``ckpt``, which ``model`` must not name.

    ``model.weights``, the name in other programs, means ``weights``.
    """
    if options["weights"] is None and options["ckpt"] is None and options["model"]["weights"] is not None:
        options = {**options, "weights": options["model"]["weights"], "model": {**options["model"], "weights": None}}
    if options["ckpt"] is not None and options["weights"] is None:
        if any(key.split(".")[0] == "model" for key in named):
            raise ConfigError("model says nothing about ckpt=, which holds its own network. fix: leave model out")
        saved = config_of_checkpoint(options["ckpt"])
        ask_for_plugins(saved, f"ckpt={options['ckpt']}", named)
        return {**options, "model": saved["model"]}
    if options["weights"] is not None and "cfg" not in options["model"]:
        raise ConfigError(f"weights={options['weights']} needs its network. fix: model=yolov3-spp or model.cfg=<file>")
    return {**options, "model": {"cfg": "", **options["model"]}}


def ask_for_plugins(saved: dict[str, Any], source: str, named: Sequence[str]) -> None:
    """Raise ConfigError if the ``saved`` options have plugins and the command line names none."""
    if saved.get("plugins") and "plugins" not in named:
        files = ",".join(Path(str(file)).name for file in saved["plugins"])
        raise ConfigError(f"{source} needs plugins=[{files}]. fix: give their paths, or plugins=[] to do without")


def config_of_checkpoint(path: str) -> dict[str, Any]:
    """The options in a checkpoint file or run folder. Raises CheckpointError for a wrong path."""
    if Path(path).suffix in (".weights", ".cfg"):
        raise CheckpointError(
            f"{path} is not a checkpoint: ckpt takes run folders and their .pt files, Darknet's are two files. "
            f"fix: {darknet_options(path)} instead of ckpt="
        )
    find_checkpoint(Path(path), "best")  # before torch is imported
    from train_utils.checkpoint import peek_config

    config = peek_config(Path(path))
    check_values(config, path)
    return config


def weights_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where published weights are kept: YOLO_HOME, or a folder in the user's cache."""
    if home := environment.get("YOLO_HOME"):
        return Path(home).expanduser()
    return Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hydra-yolov3-spp"


def fetch_weights(entry: Published) -> Path:
    """The file of published weights, fetched unless it is there, and verified in any case.

    Raises the DataError of ``download``, which says where to put the file by hand, and ConfigError
    where the file is not the user's.
    """
    path = weights_folder() / entry.file_name
    if not is_here(entry):
        print(f"{entry.url} ({entry.size / 1e6:.0f} MB) -> {path}", flush=True)
    download(entry.url, path, f"sha1:{entry.sha1}" if entry.sha1 else None, entry.size)
    return path


def is_here(entry: Published) -> bool:
    """Whether there is a file, right or wrong. Raises ConfigError if the user may not read it."""
    path = weights_folder() / entry.file_name
    try:
        with path.open("rb"):
            return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        fix = "fix: its permissions, or YOLO_HOME=<another folder>"
        raise ConfigError(f"cannot read {path} ({error.strerror}). {fix}") from error


def weights_path(config: ModelConfig, world: World | None = None) -> Path | None:
    """The file of ``model.weights``; None if the network starts from random values.

    All ranks of ``world`` call this together; one of a node fetches published weights.
    """
    from train_utils.distributed import max_over_ranks, torch_distributed_zero_first  # imports torch

    entry = config.published()
    # Ranks may have other weights: all enter the wait if one fetches.
    together = world is not None and max_over_ranks([entry is not None])[0]
    with torch_distributed_zero_first(world) if world is not None and together else nullcontext():
        if entry is not None:
            return fetch_weights(entry)
    return Path(config.weights) if config.weights is not None else None
