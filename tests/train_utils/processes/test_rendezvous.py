"""Rendezvous of several ranks, played by threads, on one store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from train_utils.errors import DistributedError
from train_utils.launch.nodes import Arrival, Peer, assign_nodes, this_machine
from train_utils.processes.connect import Deadline
from train_utils.processes.rendezvous import Rendezvous, describe, meet


class MemoryStore:
    """A store in memory; ``blocked`` holds every request, as a cut link does."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.blocked, self._lock = threading.Event(), threading.Lock()

    def _do(self, action: Callable[[], Any]) -> Any:
        while self.blocked.is_set():
            time.sleep(0.01)
        with self._lock:
            return action()

    def add(self, key: str, value: int, /) -> int:
        def action() -> int:
            self.values[key] = str(int(self.values.get(key, b"0")) + value).encode()
            return int(self.values[key])

        return int(self._do(action))

    def check(self, keys: list[str], /) -> bool:
        return bool(self._do(lambda: all(key in self.values for key in keys)))

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        def action() -> bytes:
            if self.values.get(key, b"").decode() == expected:
                self.values[key] = desired.encode()
            return self.values[key]

        return bytes(self._do(action))

    def get(self, key: str, /) -> bytes:
        return bytes(self._do(lambda: self.values[key]))


def arrival(rank: int, world_size: int, *on_node: int | None, machine: str = "") -> Arrival:
    """An arrival; ``on_node`` is local rank, local world size and node rank if given."""
    host = machine or "ab"[rank // 2]
    return Arrival(rank, world_size, host, host, *(on_node or (None, None, None)))


def start(store: MemoryStore, arrivals: list[Arrival], seconds: float = 20) -> list[Rendezvous | str]:
    """Run a rendezvous; return each rank's result or error."""

    def come(me: Arrival) -> Rendezvous | str:
        try:
            return meet(store, me, Deadline(seconds))
        except DistributedError as error:
            return str(error)

    with ThreadPoolExecutor(len(arrivals)) as pool:
        return list(pool.map(come, arrivals))


def learned(store: MemoryStore, ranks: list[int], world_size: int) -> Rendezvous:
    """The result of a rendezvous, the same on all ranks."""
    first, *others = start(store, [arrival(rank, world_size) for rank in ranks])
    assert isinstance(first, Rendezvous) and others == [first] * len(others)
    return first


def test_each_start_finds_its_own_processes_in_a_store_that_is_used_again() -> None:
    store = MemoryStore()
    first = learned(store, [3, 1, 2, 0], 4)
    assert first.number == 1
    assert first.peers == tuple(Peer(rank, rank // 2, "ab"[rank // 2], rank % 2, 2) for rank in range(4))
    second = learned(store, [2, 1, 3, 0], 4)
    assert second.number == 2 and second.token != first.token
    store.add("asked", 1)  # by a rank that was killed right then
    third = learned(store, [1, 0], 2)
    assert third.number == 3 and len(third.peers) == 2


def test_ranks_that_do_not_come_are_named() -> None:
    store = MemoryStore()
    said = "rank 1, 3 of 4 did not come within 0.5 s. fix: look for the first error in the output of all processes, "
    assert start(store, [arrival(0, 4), arrival(2, 4)], 0.5) == [f"{said}and start all of them"] * 2
    (alone,) = start(store, [arrival(2, 4)], 0.2)
    assert "rank 2 heard nothing from rank 0 within 0.2 s. fix:" in str(alone)
    assert learned(store, [0, 1], 2).number == 2, "the next start is whole again"


@pytest.mark.parametrize(
    ("arrivals", "said"),
    [
        (
            [arrival(0, 3), arrival(1, 3), arrival(1, 3, machine="b")],
            "two processes say that they are rank 1, on a and b. fix:",
        ),
        ([arrival(0, 3), arrival(1, 2)], "(WORLD_SIZE) is 2 for rank 1 on a and 3 for rank 0 on a. fix:"),
        ([arrival(0, 2), arrival(2, 3)], "(WORLD_SIZE) is 2 for rank 0 on a and 3 for rank 2 on b. fix:"),
        (
            [arrival(0, 2, 0, 1, 0), arrival(1, 2, 0, 1, 0)],
            "ranks 0, 1 on a share a node and have the local ranks (LOCAL",
        ),
    ],
)
def test_what_does_not_come_out_is_told_to_all_at_once(arrivals: list[Arrival], said: str) -> None:
    started = time.monotonic()
    first, *others = start(MemoryStore(), arrivals)
    assert said in str(first) and "fix: " in str(first) and others == [first] * len(others)
    assert time.monotonic() - started < 10, "nobody waits for the time-out"


Numbers = tuple[int | None, int | None, int | None]


@pytest.mark.parametrize("known", [0b000, 0b001, 0b010, 0b011, 0b100, 0b101, 0b110, 0b111])
@pytest.mark.parametrize("machines", ["a", "aa", "ab", "aab", "abab", "abb"])
def test_places_follow_from_the_hosts_whatever_launchers_leave_out(machines: str, known: int) -> None:
    """This holds even if the ranks of a machine are not consecutive."""
    names = list(dict.fromkeys(machines))
    whole = [
        Peer(rank, names.index(name), name, machines[:rank].count(name), machines.count(name))
        for rank, name in enumerate(machines)
    ]
    numbers: list[Numbers] = [
        (
            peer.local_rank if known & 1 else None,
            peer.local_world_size if known & 2 else None,
            peer.node_rank if known & 4 else None,
        )
        for peer in whole
    ]
    arrivals = [arrival(rank, len(machines), *number, machine=machines[rank]) for rank, number in enumerate(numbers)]
    assert assign_nodes(arrivals) == whole
    if known == 0b111:  # nodes of a simulated cluster share a machine
        hosts = [
            Arrival(c.rank, c.world_size, "x", "x", c.local_rank, c.local_world_size, c.node_rank) for c in arrivals
        ]
        assert [(m.node_rank, m.local_rank) for m in assign_nodes(hosts)] == [
            (m.node_rank, m.local_rank) for m in whole
        ]
    arrivals[0] = arrival(0, len(machines), None, 2 if machines == "a" else 1, None, machine="a")
    if machines.count("a") > 1 or machines == "a":
        with pytest.raises(DistributedError, match=r"LOCAL_WORLD_SIZE\).*fix: "):
            assign_nodes(arrivals)
    arrivals[0] = arrival(0, len(machines), None, None, 1, machine="a")
    if not known & 4:
        with pytest.raises(DistributedError, match=r"node 1 \(GROUP_RANK\).*fix: "):
            assign_nodes(arrivals)


def test_this_machine_has_one_name() -> None:
    assert this_machine() == this_machine() and this_machine().strip()


def test_ranks_are_described_by_node() -> None:
    peers = [Peer(rank, rank // 2, "ab"[rank // 2], rank % 2, 2) for rank in range(4)]
    assert describe([1], peers) == "rank 1 (node 0, a)"
    assert describe([2, 1, 3], peers) == "rank 1 (node 0, a) and ranks 2, 3 (node 1, b)"
    assert describe([], peers) == "nobody"
