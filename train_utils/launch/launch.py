"""What a launcher says about this process, and helpers that read its variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from train_utils.errors import DistributedError

FIRST_PORT, PORTS = 20000, 10000  # range of ports derived from a job number or name
LARGEST_PORT = 65535


@dataclass(frozen=True)
class Launch:
    """Ranks and rendezvous as the launcher gave them to this process; ``local``: on the same node.

    What the launcher does not say about the node is None and follows from the hosts at rendezvous.
    """

    launcher: str  # "torchrun" (or torch's variables set by hand), "srun" or "none"
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    node_rank: int | None
    address: str  # host of the rendezvous store
    port: int


ALONE = Launch("none", rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, address="", port=0)


def checked(launch: Launch) -> Launch:
    """Return ``launch``; raise DistributedError if its numbers contradict each other."""
    local_rank, local_world_size = launch.local_rank or 0, launch.local_world_size
    most = launch.world_size if local_world_size is None else local_world_size
    if not (launch.rank < launch.world_size and local_rank < most <= launch.world_size):
        local = f", local rank {local_rank} of {most}" if local_rank >= most or most > launch.world_size else ""
        raise DistributedError(
            f"the variables of {launch.launcher} contradict each other: rank {launch.rank} of {launch.world_size}"
            f"{local}. fix: unset those left from another launch"
        )
    if launch.world_size > 1 and not 0 < launch.port <= LARGEST_PORT:
        raise DistributedError(f"MASTER_PORT={launch.port} is not a port. fix: a number from 1024 to {LARGEST_PORT}")
    return launch


def integer(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The number in variable ``name``, or ``default``; DistributedError if there is neither."""
    value = environment.get(name)
    if value is None and default is not None:
        return default
    if value is None or not (value.isascii() and value.isdecimal()):
        got = "is missing" if value is None else f"is {value!r}, not a number,"
        raise DistributedError(
            f"the environment variable {name} {got} while others of the same launcher are set. fix: start with "
            "torchrun or srun, or export RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process; for one "
            "process unset RANK and WORLD_SIZE"
        )
    return int(value)


def integer_or_none(environment: Mapping[str, str], name: str) -> int | None:
    """Like ``integer``, but None if the variable is absent."""
    return integer(environment, name) if name in environment else None
