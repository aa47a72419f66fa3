"""Rendezvous: how the ranks of one start find each other in a store that may predate them.

torchrun keeps its store across restarts, with everything earlier processes left in it. Its restart
count does not identify a start: each agent counts the failures on its own node, so nodes disagree.
Rank 0 therefore numbers the starts and answers everyone who asks for the number. An answer to a
dead process does no harm: agents start new processes only when the earlier ones are dead.
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
class Rendezvous:
    """One start of all ranks."""

    number: int  # from 1
    token: str  # unique to this start
    members: tuple[Member, ...]  # in the order of their ranks


def meet(store: Store, me: Claim, deadline: Deadline) -> Rendezvous:
    """Wait for all ranks of this start and return who they are.

    Raises DistributedError if the store is lost or ranks are missing at the deadline (it names
    them), and SharedError if the claims of the ranks contradict each other.
    """
    with lost_store_as_error():
        number = _answer_peers(store, me, deadline) if me.rank == 0 else _ask_rank_0(store, me, deadline)
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
        return Rendezvous(number, token, tuple(Member(**fields) for fields in found))


def describe(ranks: Sequence[int], members: Sequence[Member]) -> str:
    """The ranks by node: ``rank 1 (node 0, a) and ranks 4, 5 (node 1, b)``, or ``nobody``."""
    nodes: dict[tuple[int, str], list[int]] = {}
    for member in members:
        if member.rank in ranks:
            nodes.setdefault((member.node_rank, member.host), []).append(member.rank)
    parts = [
        f"rank{'s' if len(here) > 1 else ''} {', '.join(map(str, here))} (node {node}, {host})"
        for (node, host), here in nodes.items()
    ]
    return " and ".join(parts) or "nobody"


def _answer_peers(store: Store, me: Claim, deadline: Deadline) -> int:
    """On rank 0: number this start, answer peers until all are here, then publish the members.

    Ends early at the deadline, or with a problem if the claims contradict each other.
    """
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


def _ask_rank_0(store: Store, me: Claim, deadline: Deadline) -> int | None:
    """On other ranks: ask rank 0 for the number of this start; None if it does not answer."""
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
    """The claims of all ranks that have arrived, in rank order."""
    keys = [f"start/{number}/claim/{place + 1}" for place in range(store.add(f"start/{number}/here", 0))]
    found = [Claim(**json.loads(store.get(key))) for key in keys if store.check([key])]
    return sorted(found, key=lambda claim: claim.rank)


def _incomplete(store: Store, number: int, world_size: int, seconds: float) -> DistributedError:
    missing = sorted(set(range(world_size)) - {claim.rank for claim in _claims(store, number)})
    return DistributedError(
        f"rank {', '.join(map(str, missing))} of {world_size} did not come within {seconds:g} s. fix: look for the "
        "first error in the output of all processes, and start all of them"
    )
