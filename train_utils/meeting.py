"""How the processes of one start find one another in a store that may be older than they are.

torchrun keeps its store when it starts the processes anew, with all that those before left in it. Its count of restarts
cannot tell the starts apart: each agent counts the failures on its own node, so that nodes disagree. Rank 0 therefore
numbers the starts, and answers everyone who asks for the number. Only processes that live take an answer up, and an
agent starts new processes when those before are dead; so an answer to one of the dead does no harm.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from train_utils.errors import DistributedError
from train_utils.store import FIRST_PAUSE_SECONDS, Store, lost_store_as_error


@dataclass(frozen=True)
class Member:
    """One process of a start."""

    rank: int
    node_rank: int
    host: str


@dataclass(frozen=True)
class Meeting:
    """One start of all processes."""

    number: int  # from 1
    token: str  # like no other start's
    members: tuple[Member, ...]  # in the order of their ranks


def meet(store: Store, me: Member, world_size: int, seconds: float) -> Meeting:
    """Wait for the ``world_size`` processes of this start and learn who they are.

    Raises DistributedError that names the ranks which did not come within ``seconds``, or after the loss of the store.
    """
    deadline = time.monotonic() + seconds
    with lost_store_as_error():
        number = _open(store, me, world_size, deadline) if me.rank == 0 else _join(store, me, deadline)
        if number is None:
            raise DistributedError(
                f"rank {me.rank} heard nothing from rank 0 within {seconds:g} s. fix: look for the first error in the "
                "output of rank 0 and of its launcher"
            )
        table = f"start/{number}/members"
        while not store.check([table]):
            if time.monotonic() > deadline:
                raise _incomplete(store, number, world_size, seconds)
            time.sleep(FIRST_PAUSE_SECONDS)
        token, *found = json.loads(store.get(table))
        return Meeting(number, token, tuple(Member(**fields) for fields in found))


def describe(ranks: Sequence[int], members: Sequence[Member]) -> str:
    """``rank 1 (node 0, a) and ranks 4, 5 (node 1, b)``: the ranks by node; ``nobody`` where there are none."""
    nodes: dict[tuple[int, str], list[int]] = {}
    for member in members:
        if member.rank in ranks:
            nodes.setdefault((member.node_rank, member.host), []).append(member.rank)
    parts = [
        f"rank{'s' if len(here) > 1 else ''} {', '.join(map(str, here))} (node {node}, {host})"
        for (node, host), here in nodes.items()
    ]
    return " and ".join(parts) or "nobody"


def _open(store: Store, me: Member, world_size: int, deadline: float) -> int:
    """Number this start, answer who asks until all are here or the time is over, and tell all who is here."""
    number, answered = store.add("starts", 1), 0
    _enter(store, number, me)
    while time.monotonic() < deadline:
        asked = store.add("asked", 0)
        for question in range(answered + 1, asked + 1):
            store.compare_set(f"answer/{question}", "", str(number))
        answered = asked
        if store.add(f"start/{number}/here", 0) == world_size:
            found = [json.loads(store.get(f"start/{number}/member/{rank}")) for rank in range(world_size)]
            store.compare_set(f"start/{number}/members", "", json.dumps([uuid.uuid4().hex, *found]))
            break
        time.sleep(FIRST_PAUSE_SECONDS)
    return number


def _join(store: Store, me: Member, deadline: float) -> int | None:
    """The number of this start; None where rank 0 did not answer in time."""
    answer = f"answer/{store.add('asked', 1)}"
    while not store.check([answer]):
        if time.monotonic() > deadline:
            return None
        time.sleep(FIRST_PAUSE_SECONDS)
    number = int(store.get(answer))
    _enter(store, number, me)
    return number


def _enter(store: Store, number: int, me: Member) -> None:
    store.compare_set(f"start/{number}/member/{me.rank}", "", json.dumps(asdict(me)))
    store.add(f"start/{number}/here", 1)


def _incomplete(store: Store, number: int, world_size: int, seconds: float) -> DistributedError:
    missing = [str(rank) for rank in range(world_size) if not store.check([f"start/{number}/member/{rank}"])]
    return DistributedError(
        f"rank {', '.join(missing)} of {world_size} did not come within {seconds:g} s. fix: look for the first error "
        "in the output of all processes, and start all of them"
    )
