"""Give each job that the joblib launcher runs in parallel its own GPU."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from omegaconf import DictConfig

from conf.failures import ConfigError

_locked: list[TextIO] = []  # the file that this process keeps locked for its GPU


def bound_jobs(config: DictConfig) -> None:
    """Let joblib run as many jobs side by side as there are GPUs.

    ``config`` belongs to the whole multirun, with ``hydra``; an ``n_jobs`` in it stays.
    """
    if _takes_gpu(config, config.hydra) and config.hydra.launcher.n_jobs == -1:
        config.hydra.launcher.n_jobs = len(_visible_gpus()) or -1


def choose_gpu(config: DictConfig, hydra: Any, folder: Path) -> None:
    """Let a job of joblib see one GPU, shared with no parallel job.

    A machine's single GPU is left to all jobs. Locks in ``folder`` record which process has which
    GPU, and end with the process. A process of joblib runs several jobs in turn and keeps its GPU,
    because CUDA binds it to that. Raises ConfigError if parallel jobs have left none.
    """
    if not _takes_gpu(config, hydra) or len(gpus := _visible_gpus()) < 2:
        return
    for gpu in gpus:
        file = (folder / f"gpu-{gpu.replace('/', '-')}.lock").open("w")  # parts of a GPU may be MIG-GPU-8f/1/0
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _locked.append(file)
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu
            return
    raise ConfigError(f"{len(gpus)} GPUs are too few for the jobs side by side. fix: hydra.launcher.n_jobs={len(gpus)}")


def _takes_gpu(config: DictConfig, hydra: Any) -> bool:
    device = config.train.device if "train" in config else config.get("device", "cpu")
    return "joblib" in hydra.launcher._target_ and device != "cpu"


def _visible_gpus() -> list[str]:
    """The GPUs of this process, as CUDA_VISIBLE_DEVICES names them."""
    if (seen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in seen.split(",") if name]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]
