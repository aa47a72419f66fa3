"""The files behind ``model.weights=coco`` and ``backbone``: fetched once, kept for all runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from conf.failures import ConfigError
from data.formats.download import download
from models.config import ModelConfig
from models.weights.published import Published

if TYPE_CHECKING:
    from train_utils.distributed import World


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
    if world is not None and max_over_ranks([entry is not None])[0]:  # ranks may have other weights
        with torch_distributed_zero_first(world):
            return fetch_weights(entry) if entry is not None else _named(config)
    return fetch_weights(entry) if entry is not None else _named(config)


def _named(config: ModelConfig) -> Path | None:
    return Path(config.weights) if config.weights is not None else None
