"""Which ranks share a node: from their launchers, else from the machines they run on."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from train_utils.errors import DistributedError

FIX = (
    "fix: start all processes with one launcher; if you set the variables by hand, leave out LOCAL_RANK, "
    "LOCAL_WORLD_SIZE and GROUP_RANK, which then follow from the hosts"
)


@dataclass(frozen=True)
class Arrival:
    """What a process says about itself at the rendezvous; None if its launcher did not say."""

    rank: int
    world_size: int
    host: str  # as shown to users
    machine: str  # equal exactly for processes that share a machine or container
    local_rank: int | None
    local_world_size: int | None
    node_rank: int | None


@dataclass(frozen=True)
class Peer:
    """One rank of a start, with its node and local rank."""

    rank: int
    node_rank: int
    host: str
    local_rank: int
    local_world_size: int


def this_machine() -> str:
    """A unique name of this machine, or of the container this process runs in."""
    parts = [socket.gethostname()]
    boot, processes = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if boot.exists():  # Linux. Host names may be shared by machines and containers
        parts += [boot.read_text().strip(), str(processes.stat().st_ino)]
    return " ".join(parts)


def conflict(arrivals: Sequence[Arrival]) -> str | None:
    """A contradiction among the processes that have arrived so far; None if there is none."""
    sizes = {arrival.world_size: arrival for arrival in reversed(arrivals)}
    if len(sizes) > 1:
        said = " and ".join(f"{size} for rank {one.rank} on {one.host}" for size, one in sorted(sizes.items()))
        return f"the number of processes (WORLD_SIZE) is {said}. fix: give all processes the same"
    seen: dict[int, Arrival] = {}
    for arrival in arrivals:
        if arrival.rank in seen:
            hosts = " and ".join(sorted([seen[arrival.rank].host, arrival.host]))
            return (
                f"two processes say that they are rank {arrival.rank}, on {hosts}. fix: give each its own RANK, and "
                "each of several runs on one machine its own MASTER_PORT"
            )
        seen[arrival.rank] = arrival
    return None


def assign_nodes(arrivals: Sequence[Arrival]) -> list[Peer]:
    """Assign nodes and local ranks to all processes of a start; takes and returns rank order.

    If every process has a node number, equal numbers share a node; otherwise equal machines do.
    Missing local ranks follow the ranks. Raises DistributedError if a process contradicts this.
    """
    numbered = all(arrival.node_rank is not None for arrival in arrivals)
    nodes: dict[int | str | None, list[Arrival]] = {}
    for arrival in sorted(arrivals, key=lambda arrival: (arrival.node_rank or 0) if numbered else 0):
        nodes.setdefault(arrival.node_rank if numbered else arrival.machine, []).append(arrival)
    peers: list[Peer] = []
    for node_rank, here in enumerate(nodes.values()):
        ranks = f"rank{'s' if len(here) > 1 else ''} {', '.join(str(one.rank) for one in here)} on {here[0].host}"
        local_ranks = [index if one.local_rank is None else one.local_rank for index, one in enumerate(here)]
        if sorted(local_ranks) != list(range(len(here))):
            said = ", ".join(map(str, local_ranks))
            raise DistributedError(f"{ranks} share a node and have the local ranks (LOCAL_RANK) {said}. {FIX}")
        for one, local_rank in zip(here, local_ranks, strict=True):
            if one.local_world_size not in (None, len(here)):
                raise DistributedError(
                    f"rank {one.rank} says that {one.local_world_size} processes are on its node (LOCAL_WORLD_SIZE), "
                    f"but it has {ranks}. {FIX}"
                )
            if one.node_rank not in (None, node_rank):
                raise DistributedError(
                    f"rank {one.rank} says that it is on node {one.node_rank} (GROUP_RANK), but its node is number "
                    f"{node_rank}, that of {ranks}. {FIX}"
                )
            peers.append(Peer(one.rank, node_rank, one.host, local_rank, len(here)))
    return sorted(peers, key=lambda peer: peer.rank)
