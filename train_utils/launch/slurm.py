"""The launch as SLURM describes it: pure functions of a mapping."""

from __future__ import annotations

import re
from collections.abc import Mapping

from train_utils.errors import DistributedError
from train_utils.launch.launch import FIRST_PORT, PORTS, Launch, integer, integer_or_none

STEP_STRIDE = 1009  # ports between two steps of one job, so that they stay clear of the next jobs' ports
NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")  # the first that is set counts
ONE_HOST = re.compile(r"[\w.-]+")


def is_srun_task(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process. An sbatch shell has SLURM_PROCID=0 too, but no step."""
    if "SLURM_PROCID" not in environment or "SLURM_LOCALID" not in environment:
        return False
    return "SLURM_STEP_ID" in environment or environment.get("ENVIRONMENT") != "BATCH"


def read_srun(environment: Mapping[str, str]) -> Launch:
    """Read the launch of an srun task; raise DistributedError if variables are missing."""
    # A step may have fewer tasks and nodes than its job, so its variables take precedence.
    in_step = "SLURM_STEP_NUM_TASKS" in environment
    world_size = integer(environment, "SLURM_STEP_NUM_TASKS" if in_step else "SLURM_NTASKS")
    nodes = next((environment[name] for name in NODE_LISTS if environment.get(name)), "")
    # Every rank must derive the same port. Steps of one job may share a node.
    job, step = integer(environment, "SLURM_JOB_ID"), integer(environment, "SLURM_STEP_ID", default=0)
    port = FIRST_PORT + (job + STEP_STRIDE * step) % PORTS
    return Launch(
        "srun",
        rank=integer(environment, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=integer(environment, "SLURM_LOCALID"),
        local_world_size=world_size if ONE_HOST.fullmatch(nodes) else None,
        node_rank=integer_or_none(environment, "SLURM_NODEID"),
        address=environment.get("MASTER_ADDR") or first_host(nodes),
        port=integer(environment, "MASTER_PORT", default=port),
    )


def refuse_shell_of_many_tasks(environment: Mapping[str, str]) -> None:
    """Raise DistributedError if the job has several tasks but srun did not start this process."""
    for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES"):
        if "SLURM_JOB_ID" in environment and environment.get(name, "1") not in ("", "1"):
            raise DistributedError(
                f"this SLURM job has {name}={environment[name]}, but this process was not started by srun and would "
                "run alone. fix: srun python ..., or srun with torchrun on each node (scripts/slurm), "
                "or srun --ntasks=1 --nodes=1 python ... for one process"
            )


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list: ``gpu[08-11,20],cpu1`` gives gpu08."""
    host = re.sub(r"\[(\d+)[^\[\]]*\]", r"\1", nodes).partition(",")[0]
    if not ONE_HOST.fullmatch(host):
        raise DistributedError(
            f"cannot read the first host from SLURM's node list {nodes!r} ({NODE_LISTS[0]}). fix: start every process "
            "with srun, or export MASTER_ADDR=<host of rank 0>"
        )
    return host
