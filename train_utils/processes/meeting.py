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

from train_utils.errors import DistributedError, SharedError
from train_utils.launch.seats import Claim, Member, conflict, seated
from train_utils.processes.reaching import Deadline
from train_utils.processes.store import FIRST_PAUSE_SECONDS, Store, linger, lost_store_as_error


@dataclass(frozen=True)
class Meeting:
    """One start of all processes."""

    number: int  # from 1
    token: str  # like no other start's
    members: tuple[Member, ...]  # in the order of their ranks


def meet(store: Store, me: Claim, deadline: Deadline) -> Meeting:
    """Wait for all processes of this start and learn who they are.

    Raises DistributedError that names the ranks which did not come before the deadline, or after the loss of the store,
    and SharedError where what the processes say of themselves contradicts each other.
    """
    with lost_store_as_error():
        number = _open(store, me, deadline) if me.rank == 0 else _join(store, me, deadline)
        if number is None:
            raise DistributedError(
                f"rank {me.rank} heard nothing from rank 0 within {deadline.seconds:g} s. fix: look for the first "
                "error in the output of rank 0 and of its launcher"
            )
        table = f"start/{number}/members"
        while not store.check([table]):
            if deadline.is_over():
                raise _incomplete(store, number, me.world_size, deadline.seconds)
            time.sleep(FIRST_PAUSE_SECONDS)
        token, problem, *found = json.loads(store.get(table))
        if problem:
            linger(store, f"start/{number}/heard", me.rank, store.add(f"start/{number}/here", 0))
            raise SharedError(problem)
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


def _open(store: Store, me: Claim, deadline: Deadline) -> int:
    """Number this start, answer who asks until all are here, one cannot stay or the time is over, and tell all who is
    here."""
    number, answered = store.add("starts", 1), 0
    _enter(store, number, me)
    while not deadline.is_over():
        asked = store.add("asked", 0)
        for question in range(answered + 1, asked + 1):
            store.compare_set(f"answer/{question}", "", str(number))
        answered = asked
        claims = _claims(store, number)
        problem, members = conflict(claims), []
        if problem is None and len(claims) == me.world_size:
            try:
                members = seated(claims)
            except DistributedError as error:
                problem = str(error)
        if problem or members:
            found = [asdict(member) for member in members]
            store.compare_set(f"start/{number}/members", "", json.dumps([uuid.uuid4().hex, problem or "", *found]))
            break
        time.sleep(FIRST_PAUSE_SECONDS)
    return number


def _join(store: Store, me: Claim, deadline: Deadline) -> int | None:
    """The number of this start; None where rank 0 did not answer in time."""
    answer = f"answer/{store.add('asked', 1)}"
    while not store.check([answer]):
        if deadline.is_over():
            return None
        time.sleep(FIRST_PAUSE_SECONDS)
    number = int(store.get(answer))
    _enter(store, number, me)
    return number


def _enter(store: Store, number: int, me: Claim) -> None:
    place = store.add(f"start/{number}/here", 1)
    store.compare_set(f"start/{number}/claim/{place}", "", json.dumps(asdict(me)))


def _claims(store: Store, number: int) -> list[Claim]:
    """What all who are here say, in the order of their ranks."""
    keys = [f"start/{number}/claim/{place + 1}" for place in range(store.add(f"start/{number}/here", 0))]
    found = [Claim(**json.loads(store.get(key))) for key in keys if store.check([key])]
    return sorted(found, key=lambda claim: claim.rank)


def _incomplete(store: Store, number: int, world_size: int, seconds: float) -> DistributedError:
    missing = sorted(set(range(world_size)) - {claim.rank for claim in _claims(store, number)})
    return DistributedError(
        f"rank {', '.join(map(str, missing))} of {world_size} did not come within {seconds:g} s. fix: look for the "
        "first error in the output of all processes, and start all of them"
    )
