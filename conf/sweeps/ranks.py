"""The processes that ``devices=`` starts for a program."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from conf.failures import ConfigError
from conf.schema import EvalConfig, TrainConfig
from train_utils.launch.environment import has_agent, peek_world_size
from train_utils.launch.limits import core_quota
from train_utils.launch.own_ranks import AUTO, is_own_rank


def wants_ranks(config: Any, in_multirun: bool = False) -> bool:
    """Whether ``devices`` asks for processes that are still to be started.

    Raises ConfigError under a launcher, which starts them itself, and in a multirun (-m).
    """
    devices = config.devices if isinstance(config, TrainConfig | EvalConfig) else None
    if devices is None or is_own_rank(os.environ):
        return False
    if in_multirun and devices != 1:
        raise ConfigError(f"devices={devices} is for one setting. fix: start each by itself, without -m")
    if has_agent() or peek_world_size() > 1:
        raise ConfigError(
            f"devices={devices} starts processes itself, and a launcher (torchrun, srun or mpirun) has started "
            "this one. fix: python without the launcher, or leave devices out"
        )
    return bool(devices != 1)


def run_on_devices(config: Any, command: Sequence[str]) -> None:
    """Run ``python <command>`` on the devices of ``config``.

    Raises SystemExit with the exit code of ranks that failed and printed why, and ConfigError if
    there are not enough GPUs.
    """
    from data.files.reading import usable_cores  # imports numpy

    device = config.train.device if isinstance(config, TrainConfig) else config.device
    before = dict(os.environ)
    try:
        count = _count(config.devices, device.value)
        cores = int(min(len(usable_cores()), core_quota()) / count)
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores)))
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # the others are passed on
        from train_utils.launch.agent import run_ranks  # imports torch

        if code := run_ranks(command, count):
            raise SystemExit(code)
    finally:
        os.environ.clear()
        os.environ.update(before)


def _count(devices: Any, device: str) -> int:
    """The number of ranks. Raises ConfigError for more than there are GPUs, if there are any."""
    import torch

    gpus = torch.cuda.device_count() if device != "cpu" else 0
    count = max(1, gpus) if devices == AUTO else int(devices)
    if 0 < gpus < count:
        raise ConfigError(
            f"devices={count} needs {count} GPUs, and torch finds {gpus} here. fix: devices=auto for all, "
            "or train.device=cpu (eval.py: device=cpu)"
        )
    return count
