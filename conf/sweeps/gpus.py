"""Give each job that the joblib launcher runs in parallel its own GPUs."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from omegaconf import DictConfig

from conf.failures import ConfigError
from train_utils.launch.own_ranks import AUTO

_claimed: dict[str, TextIO] = {}  # the GPUs of this process, each with the file that it keeps locked
_all: list[str] = []  # the GPUs that this process saw before it claimed some


def bound_jobs(config: DictConfig) -> None:
    """Let joblib run as many jobs side by side as the GPUs allow.

    ``config`` belongs to the whole multirun, with ``hydra``; an ``n_jobs`` in it stays.
    """
    launcher, wanted = config.hydra.launcher, _wanted(config)
    if _runs_joblib(config.hydra) and launcher.n_jobs == -1 and wanted and (gpus := _visible_gpus()):
        launcher.n_jobs = max(1, len(gpus) // wanted)


def choose_gpus(config: DictConfig, hydra: Any, folder: Path) -> None:
    """Let a job of joblib see as many GPUs as ``devices`` asks for, shared with no parallel job.

    ``devices=null`` asks for one GPU. A machine's single GPU is left to all jobs.
    Locks in ``folder`` record which process has which GPU, and end with the process. A process of
    joblib runs several jobs in turn and keeps its GPUs, because CUDA binds it to them.
    Raises ConfigError if parallel jobs have left too few.
    """
    if not _runs_joblib(hydra) or not (wanted := _wanted(config)):
        return
    _all[:] = _all or _visible_gpus()
    if not wanted <= len(_all) > 1:
        return
    for gpu in _all:
        if len(_claimed) < wanted and gpu not in _claimed:
            file = (folder / f"gpu-{gpu.replace('/', '-')}.lock").open("w")  # parts of a GPU may be MIG-GPU-8f/1/0
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _claimed[gpu] = file
    if len(_claimed) < wanted:
        _claimed.clear()  # closing the files frees them
        raise ConfigError(
            f"{len(_all)} GPUs are too few for the jobs side by side. fix: hydra.launcher.n_jobs={len(_all) // wanted}"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join([*_claimed][:wanted])


def _runs_joblib(hydra: Any) -> bool:
    return "joblib" in hydra.launcher._target_


def _wanted(config: DictConfig) -> int:
    """How many GPUs a job takes; 0 if it takes none, or if ``devices`` will be refused."""
    device = config.train.device if "train" in config else config.get("device", "cpu")
    devices: Any = config.get("devices") or 1
    if device == "cpu" or not (isinstance(devices, int) or devices == AUTO):
        return 0
    return max(1, len(_all or _visible_gpus())) if devices == AUTO else devices


def _visible_gpus() -> list[str]:
    """The GPUs of this process, as CUDA_VISIBLE_DEVICES names them."""
    if (seen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in seen.split(",") if name]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]
