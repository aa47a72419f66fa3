"""The files behind ``model.weights=coco`` and ``backbone``: fetched once, kept for all runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from data.files.bars import bar
from data.formats.download import Expected, download
from models.config import ModelConfig
from models.weights.published import Published

if TYPE_CHECKING:
    from train_utils.distributed import World

ATTEMPTS, TIMEOUT_SECONDS = 5, 60.0  # as conf/get_data.yaml


def weights_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where published weights are kept: YOLO_HOME, or a folder in the user's cache."""
    if home := environment.get("YOLO_HOME"):
        return Path(home).expanduser()
    return Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hydra-yolov3-spp"


def fetch_weights(entry: Published) -> Path:
    """The file of published weights, fetched unless it is there, and verified in any case.

    Raises the errors of ``download``: UnreachableError says where to put the file by hand.
    """
    path = weights_folder() / entry.file_name
    if not path.exists():
        print(f"{entry.url} ({entry.size / 1e6:.0f} MB) -> {path}", flush=True)
    with bar(entry.file_name) as report:
        download(entry.url, path, Expected(entry.sha1, "sha1", entry.size), ATTEMPTS, TIMEOUT_SECONDS, report)
    return path


def weights_path(config: ModelConfig, world: World | None = None) -> Path | None:
    """The file of ``model.weights``; None if the network starts from random values.

    All ranks of ``world`` call this together; one on each disk fetches published weights.
    """
    from train_utils.distributed import max_over_ranks, torch_distributed_zero_first  # imports torch

    entry = config.published()
    if world is not None and max_over_ranks([entry is not None])[0]:  # ranks may have other weights
        with torch_distributed_zero_first(world, weights_folder()):
            return fetch_weights(entry) if entry is not None else _named(config)
    return fetch_weights(entry) if entry is not None else _named(config)


def _named(config: ModelConfig) -> Path | None:
    return Path(config.weights) if config.weights is not None else None
