"""Starts of several processes on one store, played by threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from train_utils.errors import DistributedError
from train_utils.meeting import Meeting, Member, describe, meet


class MemoryStore:
    """A store in memory. ``blocked`` holds every request, as a link that was cut does."""

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


def start(store: MemoryStore, ranks: list[int], world_size: int, seconds: float = 20) -> list[Meeting]:
    """What ``ranks`` of a start learn, or the error of the first of them."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        me = [Member(rank, rank // 2, "ab"[rank // 2]) for rank in ranks]
        return list(pool.map(lambda member: meet(store, member, world_size, seconds), me))


def test_each_start_finds_its_own_processes_in_a_store_that_is_used_again() -> None:
    store = MemoryStore()
    first = start(store, [3, 1, 2, 0], 4)
    assert first == [first[0]] * 4 and first[0].number == 1
    assert first[0].members == tuple(Member(rank, rank // 2, "ab"[rank // 2]) for rank in range(4))
    second = start(store, [2, 1, 3, 0], 4)
    assert second == [second[0]] * 4 and second[0].number == 2 and second[0].token != first[0].token
    store.add("asked", 1)  # by a process that was killed right then
    third = start(store, [1, 0], 2)
    assert third == [third[0]] * 2 and third[0].number == 3 and len(third[0].members) == 2


def test_ranks_that_do_not_come_are_named() -> None:
    store = MemoryStore()
    with pytest.raises(DistributedError, match=r"rank 1, 3 of 4 did not come within 0\.5 s\. fix:"):
        start(store, [0, 2], 4, 0.5)
    with pytest.raises(DistributedError, match=r"rank 2 heard nothing from rank 0 within 0\.2 s\. fix:"):
        start(store, [2], 4, 0.2)
    assert {meeting.number for meeting in start(store, [0, 1], 2)} == {2}, "the next start is whole again"


def test_ranks_are_described_by_node() -> None:
    members = [Member(rank, rank // 2, "ab"[rank // 2]) for rank in range(4)]
    assert describe([1], members) == "rank 1 (node 0, a)"
    assert describe([2, 1, 3], members) == "rank 1 (node 0, a) and ranks 2, 3 (node 1, b)"
    assert describe([], members) == "nobody"
