"""The launch as SLURM describes it: pure functions of a mapping."""

from __future__ import annotations

import re
from collections.abc import Mapping

from train_utils.errors import DistributedError
from train_utils.launch.place import FIRST_PORT, PORTS, Launch, integer, integer_or_none


def is_srun_task(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process. An sbatch shell has SLURM_PROCID=0 too, but no step."""
    if "SLURM_PROCID" not in environment or "SLURM_LOCALID" not in environment:
        return False
    return "SLURM_STEP_ID" in environment or environment.get("ENVIRONMENT") != "BATCH"


def read_srun(environment: Mapping[str, str]) -> Launch:
    """Read the launch of an srun task; raise DistributedError if variables are missing."""
    node_rank = integer_or_none(environment, "SLURM_NODEID")
    # A step may have fewer tasks and nodes than its job, so its variables take precedence.
    in_step = "SLURM_STEP_NUM_TASKS" in environment
    world_size = integer(environment, "SLURM_STEP_NUM_TASKS" if in_step else "SLURM_NTASKS")
    tasks_per_node = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    tasks = expand_tasks_per_node(tasks_per_node or str(world_size))
    job, step = integer(environment, "SLURM_JOB_ID"), integer(environment, "SLURM_STEP_ID", default=0)
    # Every rank must derive the same port. Steps of one job may share a node; the factor keeps
    # their ports away from those of the next jobs.
    port = FIRST_PORT + (job + 1009 * step) % PORTS
    nodes = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return Launch(
        "srun",
        rank=integer(environment, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=integer(environment, "SLURM_LOCALID"),
        local_world_size=None if node_rank is None else tasks[min(node_rank, len(tasks) - 1)],
        node_rank=node_rank,
        address=environment.get("MASTER_ADDR") or expand_hostlist(_first(environment, *nodes))[0],
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


def expand_hostlist(text: str) -> list[str]:
    """Expand a SLURM node list: ``a[1-3,07],b`` gives a1, a2, a3, a07, b, zeros kept."""
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        expanded = [""]
        for plain, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", item):
            endings = [plain] if plain else [number for part in ranges.split(",") for number in _expand_range(part)]
            expanded = [start + ending for start in expanded for ending in endings]
        hosts += expanded
    if not hosts or text.count("[") != text.count("]"):
        raise DistributedError(f"cannot read the SLURM node list {text!r}. fix: export MASTER_ADDR=<first host>")
    return hosts


def expand_tasks_per_node(text: str) -> list[int]:
    """Expand the tasks per node: ``2(x3),1`` gives 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise DistributedError(f"cannot read SLURM's tasks per node {text!r}. fix: start the job with srun")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _expand_range(part: str) -> list[str]:
    first, dash, last = part.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise DistributedError(f"cannot read the range {part!r} of a SLURM node list. fix: export MASTER_ADDR")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]


def _first(environment: Mapping[str, str], *names: str) -> str:
    value = next((environment[name] for name in names if environment.get(name)), None)
    if value is None:
        raise DistributedError(f"SLURM set none of {', '.join(names)}. fix: start every process with srun")
    return value
