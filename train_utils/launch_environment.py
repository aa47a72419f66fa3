"""What a launcher says about this process, read from its environment variables: pure functions of a mapping.

Three launchers are known: torch's (``torchrun``, ``python -m torch.distributed.run`` or ``.launch``), SLURM's ``srun``
with one task for each process, and none. distributed.py hands in the real environment; tests hand in dictionaries.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from train_utils.errors import DistributedError

FIRST_SLURM_PORT = 20000
SLURM_PORTS = 10000


@dataclass(frozen=True)
class Launch:
    """Place of this process among all; ranks count from 0, ``local`` means on the same node."""

    launcher: str  # "torchrun", "srun" or "none"
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    address: str  # host of the store where the processes meet
    port: int


ALONE = Launch("none", rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, address="", port=0)


def read_launch(environment: Mapping[str, str]) -> Launch:
    """The launch that ``environment`` describes; torch's variables win, since torchrun itself may run under srun.

    Raises DistributedError where the variables contradict each other or are incomplete, and where SLURM gave several
    tasks but this process was not started by srun: it would silently train alone.
    """
    if "RANK" in environment:
        launch = _read_torchrun(environment)
    elif _is_srun_task(environment):
        launch = _read_srun(environment)
    elif environment.get("WORLD_SIZE", "1") != "1":
        launch = _read_torchrun(environment)
    else:
        _refuse_shell_of_many_tasks(environment)
        return ALONE
    if not (0 <= launch.rank < launch.world_size and 0 <= launch.local_rank < launch.local_world_size):
        raise DistributedError(
            f"the variables of {launch.launcher} contradict each other: rank {launch.rank} of {launch.world_size}, "
            f"local rank {launch.local_rank} of {launch.local_world_size}. fix: unset those left from another launch"
        )
    return launch


def peek_rank(environment: Mapping[str, str]) -> int:
    """The rank before anything is checked, for programs that must know who may speak; 0 where nothing is said."""
    rank = environment.get("RANK") or (environment["SLURM_PROCID"] if _is_srun_task(environment) else "0")
    return int(rank) if rank.isdecimal() else 0


def peek_world_size(environment: Mapping[str, str]) -> int:
    """The number of processes before anything is checked; 1 where nothing is said."""
    names = ["WORLD_SIZE"]
    if "RANK" not in environment and _is_srun_task(environment):
        names = ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"]
    return next((int(environment[name]) for name in names if environment.get(name, "").isdecimal()), 1)


def slurm_job_name(environment: Mapping[str, str]) -> str | None:
    """``<job>``, or ``<array job>_<task>`` inside a job array: the name that stays the same when a job is requeued."""
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID") or None


class JobPlace(NamedTuple):
    """Which job and which start of it a process belongs to; "" and 0 where there is none."""

    job: str  # slurm_job_name
    step: str  # of the job: srun counts them
    restarts: int  # of the job, by a requeue
    run: str  # torchrun's id
    run_restarts: int  # by torchrun; on a node that lost no process it may stay behind


def read_job_place(environment: Mapping[str, str]) -> JobPlace:
    """The job that ``environment`` describes."""
    job = slurm_job_name(environment) or ""
    return JobPlace(
        job,
        environment.get("SLURM_STEP_ID", "") if job else "",
        _integer(environment, "SLURM_RESTART_COUNT", default=0) if job else 0,
        _run_id(environment) or "",
        _integer(environment, "TORCHELASTIC_RESTART_COUNT", default=0),
    )


def job_folder_name(environment: Mapping[str, str]) -> str | None:
    """The name of a run's folder that stays the same when the run is started again: ``slurm-<job>``, or
    ``torchrun-<run id>`` where torchrun may restart it and has an id (``--rdzv-id``, by itself on one machine)."""
    job, run = slurm_job_name(environment), _run_id(environment)
    if job is not None:
        return f"slurm-{job}"
    if allowed_restarts(environment) == 0 or run is None:
        return None
    return f"torchrun-{re.sub(r'[^0-9A-Za-z_.-]', '_', run)}"


def allowed_restarts(environment: Mapping[str, str]) -> int:
    """How often torchrun may start this run again (``--max-restarts``); 0 under other launchers."""
    return _integer(environment, "TORCHELASTIC_MAX_RESTARTS", default=0)


def has_agent(environment: Mapping[str, str]) -> bool:
    """Whether a torchrun started this process and watches over it; variables set by hand are none."""
    return "TORCHELASTIC_RUN_ID" in environment


def agent_holds_store(environment: Mapping[str, str]) -> bool:
    """Whether the processes meet in the store of torchrun itself, which outlives rank 0."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def node_name(environment: Mapping[str, str], host: str) -> str:
    """SLURM's name of this node, else ``host``, which nodes of a simulated cluster share."""
    return environment.get("SLURMD_NODENAME") or host


def _run_id(environment: Mapping[str, str]) -> str | None:
    run = environment.get("TORCHELASTIC_RUN_ID", "none")
    return None if run in ("", "none") else run


def requeue_file(environment: Mapping[str, str]) -> Path | None:
    """The file by which a run asks its job script to be requeued; None where no script offers to do that."""
    return Path(environment["REQUEUE_FILE"]) if environment.get("REQUEUE_FILE") else None


def describe_launch(launch: Launch, environment: Mapping[str, str], host: str) -> str:
    """One line: rank, node and meeting point."""
    node = node_name(environment, host)
    meeting = f", meets at {launch.address}:{launch.port} ({launch.launcher})" if launch.world_size > 1 else ""
    return f"rank {launch.rank} of {launch.world_size}: local rank {launch.local_rank}, node {node}{meeting}"


def strip_local_rank(arguments: list[str]) -> tuple[list[str], int | None]:
    """Arguments without the ``--local_rank N``, ``--local-rank=N`` that torch.distributed.launch adds, and N.

    The value is also in LOCAL_RANK, which is what ``read_launch`` reads; here it only must not reach Hydra.
    """
    kept: list[str] = []
    local_rank: int | None = None
    remaining = iter(arguments)
    for argument in remaining:
        flag, equals, value = argument.partition("=")
        if flag not in ("--local_rank", "--local-rank"):
            kept.append(argument)
            continue
        value = value if equals else next(remaining, "")
        if not value.isdecimal():
            raise DistributedError(f"{flag} needs a number, got {value!r}. fix: leave it to the launcher")
        local_rank = int(value)
    return kept, local_rank


def expand_hostlist(text: str) -> list[str]:
    """Host names of a SLURM node list: ``a[1-3,07],b`` gives a1, a2, a3, a07, b; leading zeros are kept."""
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
    """Tasks on each node of a step: ``2(x3),1`` gives 2, 2, 2, 1."""
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


def _read_torchrun(environment: Mapping[str, str]) -> Launch:
    rank, world_size, local_rank = (_integer(environment, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    # A launch by hand may leave these two out on one node; on several they tell which processes share a disk.
    on_one_node = world_size if local_rank == rank else None
    local_world_size = _integer(environment, "LOCAL_WORLD_SIZE", default=on_one_node)
    return Launch(
        "torchrun",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=_integer(environment, "GROUP_RANK", default=rank // max(1, local_world_size)),
        address=environment.get("MASTER_ADDR", "localhost"),
        port=_integer(environment, "MASTER_PORT", default=29500),
    )


def _read_srun(environment: Mapping[str, str]) -> Launch:
    node_rank = _integer(environment, "SLURM_NODEID", default=0)
    # A step may have fewer tasks and nodes than its job, so the variables of the step come first.
    in_step = "SLURM_STEP_NUM_TASKS" in environment
    world_size = _integer(environment, "SLURM_STEP_NUM_TASKS" if in_step else "SLURM_NTASKS")
    tasks_per_node = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    tasks = expand_tasks_per_node(tasks_per_node or str(world_size))
    job, step = _integer(environment, "SLURM_JOB_ID"), _integer(environment, "SLURM_STEP_ID", default=0)
    # Every process must come to the same port without asking. Steps of one job may run side by side on a node; the
    # factor keeps them away from the ports of the jobs that came next.
    port = FIRST_SLURM_PORT + (job + 1009 * step) % SLURM_PORTS
    nodes = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return Launch(
        "srun",
        rank=_integer(environment, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_integer(environment, "SLURM_LOCALID"),
        local_world_size=tasks[min(node_rank, len(tasks) - 1)],
        node_rank=node_rank,
        address=environment.get("MASTER_ADDR") or expand_hostlist(_first(environment, *nodes))[0],
        port=_integer(environment, "MASTER_PORT", default=port),
    )


def _is_srun_task(environment: Mapping[str, str]) -> bool:
    """The shell of an sbatch script also has SLURM_PROCID=0; only srun sets the variables of a step."""
    if "SLURM_PROCID" not in environment or "SLURM_LOCALID" not in environment:
        return False
    return "SLURM_STEP_ID" in environment or environment.get("ENVIRONMENT") != "BATCH"


def _refuse_shell_of_many_tasks(environment: Mapping[str, str]) -> None:
    for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES"):
        if "SLURM_JOB_ID" in environment and environment.get(name, "1") not in ("", "1"):
            raise DistributedError(
                f"this SLURM job has {name}={environment[name]}, but this process was not started by srun and would "
                "run alone. fix: srun python ..., or srun with torchrun on each node (scripts/slurm), "
                "or srun --ntasks=1 --nodes=1 python ... for one process"
            )


def _first(environment: Mapping[str, str], *names: str) -> str:
    value = next((environment[name] for name in names if environment.get(name)), None)
    if value is None:
        raise DistributedError(f"SLURM set none of {', '.join(names)}. fix: start every process with srun")
    return value


def _integer(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = environment.get(name)
    if value is None and default is not None:
        return default
    if value is None or not value.isdecimal():
        got = "is missing" if value is None else f"is {value!r}, not a number"
        raise DistributedError(
            f"the environment variable {name} {got} while others of the same launcher are there. fix: start with "
            "torchrun or srun; for one process unset RANK and WORLD_SIZE"
        )
    return int(value)
