"""Chunks of work come back in order, whichever thread did them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from data.files import CHUNK, in_chunks


def test_fast_work_stays_in_one_thread_and_waiting_is_shared() -> None:
    items = list(range(CHUNK * 20 + 7))
    threads: set[int] = set()

    def work(chunk: Sequence[int]) -> list[int]:
        threads.add(threading.get_ident())
        return [2 * item for item in chunk]

    def wait(chunk: Sequence[int]) -> list[int]:
        time.sleep(0.02)
        return work(chunk)

    for function in (work, wait):
        threads.clear()
        results = list(in_chunks(function, items, "testing"))
        assert [item for result in results for item in result] == [2 * item for item in items]
    assert len(threads) > 2
    assert list(in_chunks(work, [], "testing")) == []


def test_an_error_ends_the_work() -> None:
    started: list[int] = []

    def fail(chunk: Sequence[int]) -> None:
        started.append(chunk[0])
        time.sleep(0.02)
        raise KeyError(chunk[0])

    with pytest.raises(KeyError):
        list(in_chunks(fail, range(CHUNK * 1000), "testing"))
    assert len(started) < 200
