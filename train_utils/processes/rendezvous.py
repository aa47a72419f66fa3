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
from train_utils.launch.nodes import Arrival, Peer, assign_nodes, conflict
from train_utils.processes.connect import POLL_SECONDS, Deadline
from train_utils.processes.store import Store, linger, lost_store_as_error


@dataclass(frozen=True)
class Rendezvous:
    """One start of all ranks."""

    number: int  # from 1
    token: str  # unique to this start
    peers: tuple[Peer, ...]  # all ranks, in order


def meet(store: Store, me: Arrival, deadline: Deadline) -> Rendezvous:
    """Wait for all ranks of this start and return who they are.

    Raises DistributedError if the store is lost or ranks are missing at the deadline (it names
    them), and SharedError if what the ranks say contradicts itself.
    """
    with lost_store_as_error():
        number = _answer_peers(store, me, deadline) if me.rank == 0 else _ask_rank_0(store, me, deadline)
        table = f"start/{number}/peers"
        if not deadline.wait_for(lambda: store.check([table])):
            missing = sorted(set(range(me.world_size)) - {arrival.rank for arrival in _arrivals(store, number)})
            raise DistributedError(
                f"rank {', '.join(map(str, missing))} of {me.world_size} did not come within {deadline.seconds:g} s. "
                "fix: look for the first error in the output of all processes, and start all of them"
            )
        token, problem, *found = json.loads(store.get(table))
        if problem:
            linger(store, f"start/{number}/heard", me.rank, store.add(f"start/{number}/here", 0))
            raise SharedError(problem)
        return Rendezvous(number, token, tuple(Peer(**fields) for fields in found))


def describe(ranks: Sequence[int], peers: Sequence[Peer]) -> str:
    """The ranks by node: ``rank 1 (node 0, a) and ranks 4, 5 (node 1, b)``, or ``nobody``."""
    nodes: dict[tuple[int, str], list[int]] = {}
    for peer in peers:
        if peer.rank in ranks:
            nodes.setdefault((peer.node_rank, peer.host), []).append(peer.rank)
    parts = [
        f"rank{'s' if len(here) > 1 else ''} {', '.join(map(str, here))} (node {node}, {host})"
        for (node, host), here in nodes.items()
    ]
    return " and ".join(parts) or "nobody"


def _answer_peers(store: Store, me: Arrival, deadline: Deadline) -> int:
    """On rank 0: number this start, answer until all ranks are here, then publish who they are.

    Ends early at the deadline, or with a problem if what the ranks say contradicts itself.
    """
    number, answered = store.add("starts", 1), 0
    _enter(store, number, me)
    while not deadline.is_over():
        asked = store.add("asked", 0)
        for question in range(answered + 1, asked + 1):
            store.compare_set(f"answer/{question}", "", str(number))
        answered = asked
        arrivals = _arrivals(store, number)
        problem, peers = conflict(arrivals), []
        if problem is None and len(arrivals) == me.world_size:
            try:
                peers = assign_nodes(arrivals)
            except DistributedError as error:
                problem = str(error)
        if problem or peers:
            found = [asdict(peer) for peer in peers]
            store.compare_set(f"start/{number}/peers", "", json.dumps([uuid.uuid4().hex, problem or "", *found]))
            break
        time.sleep(POLL_SECONDS)
    return number


def _ask_rank_0(store: Store, me: Arrival, deadline: Deadline) -> int:
    """On other ranks: ask rank 0 for the number of this start."""
    answer = f"answer/{store.add('asked', 1)}"
    if not deadline.wait_for(lambda: store.check([answer])):
        raise DistributedError(
            f"rank {me.rank} heard nothing from rank 0 within {deadline.seconds:g} s. fix: look for the first "
            "error in the output of rank 0 and of its launcher"
        )
    number = int(store.get(answer))
    _enter(store, number, me)
    return number


def _enter(store: Store, number: int, me: Arrival) -> None:
    count = store.add(f"start/{number}/here", 1)
    store.compare_set(f"start/{number}/arrival/{count}", "", json.dumps(asdict(me)))


def _arrivals(store: Store, number: int) -> list[Arrival]:
    """What all ranks that have arrived say, in rank order."""
    keys = [f"start/{number}/arrival/{count + 1}" for count in range(store.add(f"start/{number}/here", 0))]
    found = [Arrival(**json.loads(store.get(key))) for key in keys if store.check([key])]
    return sorted(found, key=lambda arrival: arrival.rank)
