"""The processes that ``devices=`` starts for a program, or for a job of a multirun."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.failures import ConfigError
from conf.schema import EvalConfig, TrainConfig
from train_utils.launch.environment import has_agent, peek_rank, peek_world_size
from train_utils.launch.limits import core_quota
from train_utils.launch.own_ranks import AUTO, is_own_rank

RESULT = "TRAIN_RESULT_FILE"  # the variable that names the file in which rank 0 leaves its result


def wants_ranks(config: Any) -> bool:
    """Whether ``devices`` asks for processes that are still to be started.

    Raises ConfigError under a launcher, which starts them itself.
    """
    devices = config.devices if isinstance(config, TrainConfig | EvalConfig) else None
    if devices is None or is_own_rank(os.environ):
        return False
    if has_agent() or peek_world_size() > 1:
        raise ConfigError(
            f"devices={devices} starts processes itself, and a launcher (torchrun, srun or mpirun) has started "
            "this one. fix: python without the launcher, or leave devices out"
        )
    return bool(devices != 1)


def run_on_devices(config: Any, command: Sequence[str]) -> Any:
    """Run ``python <command>`` on the devices of ``config``; return the result that rank 0 leaves.

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
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder, "result.json")
            os.environ[RESULT] = str(result)
            from train_utils.launch.agent import run_ranks  # imports torch

            if code := run_ranks(command, count):
                raise SystemExit(code)
            return json.loads(result.read_text(encoding="utf-8")) if result.exists() else None
    finally:
        os.environ.clear()
        os.environ.update(before)


def leave_result(result: Any) -> Any:
    """Leave a number for the process that started this rank, if it is rank 0; return ``result``."""
    if is_own_rank(os.environ) and RESULT in os.environ and peek_rank() == 0 and isinstance(result, int | float):
        Path(os.environ[RESULT]).write_text(json.dumps(result), encoding="utf-8")
    return result


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
