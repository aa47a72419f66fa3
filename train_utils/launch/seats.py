"""Which ranks share a node: from their launchers, else from the machines they run on."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from train_utils.errors import DistributedError

FIX = (
    "fix: start all processes with one launcher; what is set by hand may be left out, LOCAL_RANK, LOCAL_WORLD_SIZE and "
    "GROUP_RANK then follow from the hosts"
)


@dataclass(frozen=True)
class Claim:
    """What a process reports about itself at rendezvous; None where its launcher was silent."""

    rank: int
    world_size: int
    host: str  # as shown to users
    machine: str  # equal exactly for processes that share a machine or container
    local_rank: int | None
    local_world_size: int | None
    node_rank: int | None


@dataclass(frozen=True)
class Member:
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


def conflict(claims: Sequence[Claim]) -> str | None:
    """A contradiction among the processes that have arrived so far; None if there is none."""
    sizes = {claim.world_size: claim for claim in reversed(claims)}
    if len(sizes) > 1:
        said = " and ".join(f"{size} for rank {claim.rank} on {claim.host}" for size, claim in sorted(sizes.items()))
        return f"the number of processes (WORLD_SIZE) is {said}. fix: give all processes the same"
    seen: dict[int, Claim] = {}
    for claim in claims:
        if claim.rank in seen:
            hosts = " and ".join(sorted([seen[claim.rank].host, claim.host]))
            return (
                f"two processes say that they are rank {claim.rank}, on {hosts}. fix: each a RANK of its own, and "
                "runs that share a machine a MASTER_PORT each"
            )
        seen[claim.rank] = claim
    return None


def seated(claims: Sequence[Claim]) -> list[Member]:
    """Assign nodes and local ranks to all processes of a start; takes and returns rank order.

    If every claim has a node number, equal numbers share a node; otherwise equal machines do.
    Missing local ranks follow the ranks. Raises DistributedError if the claims contradict this.
    """
    named = all(claim.node_rank is not None for claim in claims)
    nodes: dict[int | str | None, list[Claim]] = {}
    for claim in sorted(claims, key=lambda claim: (claim.node_rank or 0) if named else 0):
        nodes.setdefault(claim.node_rank if named else claim.machine, []).append(claim)
    members: list[Member] = []
    for node_rank, here in enumerate(nodes.values()):
        ranks = f"rank{'s' if len(here) > 1 else ''} {', '.join(str(claim.rank) for claim in here)} on {here[0].host}"
        local_ranks = [place if claim.local_rank is None else claim.local_rank for place, claim in enumerate(here)]
        if sorted(local_ranks) != list(range(len(here))):
            said = ", ".join(map(str, local_ranks))
            raise DistributedError(f"{ranks} share a node and have the local ranks (LOCAL_RANK) {said}. {FIX}")
        for claim, local_rank in zip(here, local_ranks, strict=True):
            if claim.local_world_size not in (None, len(here)):
                raise DistributedError(
                    f"rank {claim.rank} says that {claim.local_world_size} processes are on its node "
                    f"(LOCAL_WORLD_SIZE), but it has {ranks}. {FIX}"
                )
            if claim.node_rank not in (None, node_rank):
                raise DistributedError(
                    f"rank {claim.rank} says that it is on node {claim.node_rank} (GROUP_RANK), but its node is the "
                    f"one with number {node_rank}, that of {ranks}. {FIX}"
                )
            members.append(Member(claim.rank, node_rank, claim.host, local_rank, len(here)))
    return sorted(members, key=lambda member: member.rank)
