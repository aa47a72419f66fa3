"""How this process was started: its place among the ranks, its SLURM job and its restarts.

Three launchers are known: torch's (``torchrun``, ``python -m torch.distributed.run`` or
``.launch``), SLURM's ``srun`` with one task per process, and none. Only this file reads the
environment; tests pass dictionaries. It imports no torch, so that a refused option costs no start
of torch.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from argparse import ArgumentError, ArgumentParser
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from train_utils.errors import DistributedError, first_line

FIRST_PORT, PORTS = 20000, 10000  # range of ports derived from a SLURM job's number
STEP_STRIDE = 1009  # ports between two steps of one job, so that they stay clear of the next jobs' ports
REPORTED_SECONDS, SILENT_SECONDS = 1.0, 4.0  # before a rank exits: launchers end the others then
LOST_SECONDS = 2.0  # for a launcher to end this rank, silently, after another one failed


class Launch(NamedTuple):
    """The place of this process among those that its launcher started; ``local``: on its node."""

    launcher: str  # "torchrun", "srun" or "none"
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str  # where the ranks meet: the host of rank 0
    port: int
    attempt: int = 0  # of torchrun's: each finds the store of the one before, with its keys


def read_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """Read the launch; torch's variables win, since torchrun may run under srun.

    Raises DistributedError if variables are missing, or if a SLURM job of several tasks runs this
    process without srun: it would silently train alone.
    """
    if "RANK" in environment:
        return Launch(
            "torchrun",
            rank=_integer(environment, "RANK"),
            world_size=_integer(environment, "WORLD_SIZE"),
            local_rank=_integer(environment, "LOCAL_RANK"),
            local_world_size=_integer(environment, "LOCAL_WORLD_SIZE"),
            address=environment.get("MASTER_ADDR", ""),
            port=_integer(environment, "MASTER_PORT", default=0),
            attempt=_integer(environment, "TORCHELASTIC_RESTART_COUNT", default=0)
            if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            else 0,
        )
    # The shell of an sbatch script has SLURM_PROCID=0 too, but no step.
    in_step = "SLURM_STEP_ID" in environment or environment.get("ENVIRONMENT") != "BATCH"
    if "SLURM_PROCID" in environment and "SLURM_LOCALID" in environment and in_step:
        return _read_srun(environment)
    if "SLURM_JOB_ID" in environment and environment.get("SLURM_NTASKS", "1") not in ("", "1"):
        raise DistributedError(
            f"this SLURM job has SLURM_NTASKS={environment['SLURM_NTASKS']}, but this process was not started by srun "
            "and would run alone. fix: srun python ... (scripts/slurm), or srun --ntasks=1 python ... for one process"
        )
    return Launch("none", rank=0, world_size=1, local_rank=0, local_world_size=1, address="", port=0)


def _read_srun(environment: Mapping[str, str]) -> Launch:
    """Read the launch of an srun task: a step may have fewer tasks and nodes than its job."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((environment[name] for name in names if environment.get(name)), "")
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "1")
    # Every rank must derive the same port. Steps of one job may share a node.
    job, step = _integer(environment, "SLURM_JOB_ID"), _integer(environment, "SLURM_STEP_ID", default=0)
    in_step = "SLURM_STEP_NUM_TASKS" in environment
    return Launch(
        "srun",
        rank=_integer(environment, "SLURM_PROCID"),
        world_size=_integer(environment, "SLURM_STEP_NUM_TASKS" if in_step else "SLURM_NTASKS"),
        local_rank=_integer(environment, "SLURM_LOCALID"),
        local_world_size=tasks_on_node(tasks, _integer(environment, "SLURM_NODEID", default=0)),
        address=environment.get("MASTER_ADDR") or first_host(nodes),
        port=_integer(environment, "MASTER_PORT", default=FIRST_PORT + (job + STEP_STRIDE * step) % PORTS),
    )


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list: ``gpu[08-11,20],cpu1`` gives gpu08."""
    host = re.sub(r"\[(\d+)[^\[\]]*\]", r"\1", nodes).partition(",")[0]
    if not re.fullmatch(r"[\w.-]+", host):
        raise DistributedError(
            f"cannot read the first host from SLURM's node list {nodes!r}. fix: export MASTER_ADDR=<host of rank 0>"
        )
    return host


def tasks_on_node(tasks: str, node: int) -> int:
    """The tasks of one node in SLURM's list: ``4(x2),1`` means 4, 4 and 1."""
    parts = (part.rstrip(")").partition("(x") for part in tasks.split(","))
    return [int(count) for count, _, times in parts for _ in range(int(times or 1))][node]


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
        _integer(environment, "SLURM_RESTART_COUNT", default=0) if job else 0,
        _run_id(environment) or "",
        _integer(environment, "TORCHELASTIC_RESTART_COUNT", default=0),
    )


def slurm_job_name(environment: Mapping[str, str]) -> str | None:
    """``<job>``, or ``<array job>_<task>`` in a job array; a requeue keeps the name."""
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID") or None


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
    return _integer(environment, "TORCHELASTIC_MAX_RESTARTS", default=0)


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


def prefer_expandable_segments() -> None:
    """Let CUDA's memory segments grow: sizes leave holes in fixed ones; call before torch loads."""
    if sys.platform == "linux" and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def fix_cublas_workspace() -> None:
    """Fix the size of cuBLAS's workspace for reproducible sums; call before CUDA is used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def claim_report() -> bool:
    """Whether this rank is the one that prints the error which ends it.

    With a process group the first rank to ask is: an error on one rank soon breaks the exchanges of
    the others. Before, while options are refused, it is one on each node.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"
    rank = str(dist.get_rank())
    try:
        return bool(dist.group.WORLD.get_group_store().compare_set("reporter", "", rank).decode() == rank)
    except RuntimeError:  # the store is lost: twice is better than never
        return True


def end_report(message: str, reported: bool) -> None:
    """Leave the error where torchrun looks for it, to print it last, and wait before the exit.

    A launcher ends the other ranks once one has ended: the one that reports comes first.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        content = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with suppress(OSError):  # the error has been printed already
            Path(path).write_text(json.dumps(content), encoding="utf-8")
    with suppress(DistributedError):
        if read_launch().world_size > 1:
            time.sleep(REPORTED_SECONDS if reported else SILENT_SECONDS)


def is_lost_peer(error: BaseException | None) -> bool:
    """Whether torch raised this because another rank ended or hangs."""
    dist = sys.modules.get("torch.distributed")
    # gloo raises RuntimeError that starts with a source line.
    by_gloo = isinstance(error, RuntimeError) and "gloo/" in str(error).partition("\n")[0]
    return by_gloo or (dist is not None and isinstance(error, dist.DistError))


def explain_lost_peer(error: BaseException) -> BaseException:
    """A DistributedError for what torch raises if another rank ended or hangs; else ``error``.

    It waits first: a rank that failed said why, and its launcher ends the others.
    """
    if not is_lost_peer(error):
        return error
    time.sleep(LOST_SECONDS)
    return DistributedError(
        f"lost another rank ({first_line(error)}). fix: look for the first error in the output of all ranks; "
        "resume=<the run folder> continues from the last checkpoint"
    )


def shutdown() -> None:
    """Leave the process group, if there is one."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()


def _run_id(environment: Mapping[str, str]) -> str | None:
    run = environment.get("TORCHELASTIC_RUN_ID", "none")
    return None if run in ("", "none") else run


def _integer(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The number in variable ``name``, or ``default``; DistributedError if there is neither."""
    value = environment.get(name)
    if value is None and default is not None:
        return default
    if value is None or not (value.isascii() and value.isdecimal()):
        got = "is missing" if value is None else f"is {value!r}, not a number,"
        raise DistributedError(
            f"the environment variable {name} {got} while others of the same launcher are set. fix: start with "
            "torchrun or srun; for one process unset RANK"
        )
    return int(value)
