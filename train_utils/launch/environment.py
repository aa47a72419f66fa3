"""What the environment says about this process: its launch, its job, its restarts.

Three launchers are known: torch's (``torchrun``, ``python -m torch.distributed.run`` or
``.launch``, or its variables set by hand), SLURM's ``srun`` with one task per process, and none.
Only this file reads the environment; tests pass dictionaries. It imports no torch, so that a
refused option costs no start of torch.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from argparse import ArgumentError, ArgumentParser
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from train_utils.errors import DistributedError
from train_utils.launch.launch import ALONE, Launch, checked, integer, integer_or_none
from train_utils.launch.slurm import is_srun_task, read_srun, refuse_shell_of_many_tasks


def read_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """Read the launch; torch's variables win, since torchrun may run under other launchers.

    Raises DistributedError if variables are missing or contradict each other, or if a launcher
    started several processes without ranks: each would silently train alone.
    """
    if "RANK" in environment:
        launch = _read_torch(environment)
    elif is_srun_task(environment):
        launch = read_srun(environment)
    elif environment.get("WORLD_SIZE", "1") != "1" or "LOCAL_RANK" in environment:
        launch = _read_torch(environment)
    else:
        refuse_shell_of_many_tasks(environment)
        return ALONE
    return checked(launch)


def peek_rank(environment: Mapping[str, str] = os.environ) -> int:
    """The rank before any check, to decide who may print; 0 if no launcher sets it."""
    return _peek(environment, _names_of_numbers(environment)[0]) or 0


def peek_world_size(environment: Mapping[str, str] = os.environ) -> int:
    """The world size before any check; 1 if no launcher sets it."""
    sizes = (_peek(environment, name) for name in _names_of_numbers(environment)[1:])
    return next((size for size in sizes if size is not None), 1)


def slurm_job_name(environment: Mapping[str, str]) -> str | None:
    """``<job>``, or ``<array job>_<task>`` in a job array; a requeue keeps the name."""
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID") or None


class Job(NamedTuple):
    """The job and restart that a process belongs to; "" and 0 if there is none."""

    job: str  # slurm_job_name
    step: str  # of the job: srun counts them
    restarts: int  # of the job, by a requeue
    run: str  # torchrun's id
    run_restarts: int  # by torchrun; on a node that lost no process it may stay behind


def read_job(environment: Mapping[str, str] = os.environ) -> Job:
    """The job that ``environment`` describes."""
    job = slurm_job_name(environment) or ""
    return Job(
        job,
        environment.get("SLURM_STEP_ID", "") if job else "",
        integer(environment, "SLURM_RESTART_COUNT", default=0) if job else 0,
        _run_id(environment) or "",
        integer(environment, "TORCHELASTIC_RESTART_COUNT", default=0),
    )


def job_folder_name(environment: Mapping[str, str] = os.environ) -> str | None:
    """A run folder name that survives restarts: ``slurm-<job>`` or ``torchrun-<run id>``.

    The latter needs a torchrun that may restart and has an id (``--rdzv-id``; automatic on one
    machine).
    """
    job, run = slurm_job_name(environment), _run_id(environment)
    if job is not None:
        return f"slurm-{job}"
    if allowed_restarts(environment) == 0 or run is None:
        return None
    return f"torchrun-{re.sub(r'[^0-9A-Za-z_.-]', '_', run)}"


def allowed_restarts(environment: Mapping[str, str] = os.environ) -> int:
    """How often torchrun may restart this run (``--max-restarts``); 0 elsewhere."""
    return integer(environment, "TORCHELASTIC_MAX_RESTARTS", default=0)


def has_agent(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a torchrun started this process; variables set by hand do not count."""
    return "TORCHELASTIC_RUN_ID" in environment


def agent_holds_store(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ranks meet in torchrun's own store, which outlives rank 0."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def report_to_launcher(message: str) -> None:
    """Leave the error where torchrun looks for it, so that torchrun prints it last."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        content = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with suppress(OSError):  # the error has been printed already
            Path(path).write_text(json.dumps(content), encoding="utf-8")


def node_name() -> str:
    """SLURM's node name, else the host's; nodes of a simulated cluster share one host."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def fix_cublas_workspace() -> None:
    """Fix the size of cuBLAS's workspace for reproducible sums; call before CUDA is used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def prefer_expandable_segments() -> None:
    """Let CUDA's memory segments grow: sizes leave holes in fixed ones; call before torch loads."""
    if sys.platform == "linux" and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def leave_failures_of_nccl() -> None:
    """Keep torch's watchdog from killing the process when NCCL fails; call before NCCL starts.

    CommunicatorWatch acts instead. torchrun sets the first variable, so it has no user's value.
    """
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"  # else the watchdog waits for a dump of its records


def _run_id(environment: Mapping[str, str]) -> str | None:
    run = environment.get("TORCHELASTIC_RUN_ID", "none")
    return None if run in ("", "none") else run


def requeue_file(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The file that asks the job script for a requeue; None if no script offers it."""
    return Path(environment["REQUEUE_FILE"]) if environment.get("REQUEUE_FILE") else None


def strip_local_rank(arguments: list[str]) -> list[str]:
    """Remove torch.distributed.launch's ``--local_rank N`` or ``--local-rank=N``.

    ``read_launch`` reads LOCAL_RANK instead; the argument must not reach Hydra.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--local_rank", "--local-rank", type=int)
    try:
        return parser.parse_known_args(arguments)[1]
    except ArgumentError as error:
        raise DistributedError("--local-rank needs a number. fix: leave it to the launcher") from error


def _names_of_numbers(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The variables of the rank and the world size; the first world size that is set counts."""
    if "RANK" not in environment and is_srun_task(environment):
        return "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"
    return "RANK", "WORLD_SIZE"


def _peek(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name, "")
    return int(value) if value.isdecimal() else None


def _read_torch(environment: Mapping[str, str]) -> Launch:
    """Read torch's variables; the four standard ones suffice, torchrun's are optional."""
    rank, world_size = integer(environment, "RANK"), integer(environment, "WORLD_SIZE")
    local_rank, local_world_size, node_rank = (
        integer(environment, name, default) if world_size == 1 else integer_or_none(environment, name)
        for name, default in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1), ("GROUP_RANK", 0))
    )
    if world_size > 1 and not environment.get("MASTER_ADDR"):
        raise DistributedError(
            f"the environment variable MASTER_ADDR is missing while WORLD_SIZE={world_size}. fix: export "
            "MASTER_ADDR=<host of rank 0> (127.0.0.1 on one machine) and MASTER_PORT=<a free port there>"
        )
    return Launch(
        "torchrun",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=node_rank,
        address=environment.get("MASTER_ADDR", ""),
        port=integer(environment, "MASTER_PORT") if world_size > 1 else 0,
    )


def watched_parent(environment: Mapping[str, str] = os.environ) -> int | None:
    """The process without which this one must end: torchrun's agent; else None."""
    return os.getppid() if has_agent(environment) else None
