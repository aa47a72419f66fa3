"""Who reports an error before there is a process group."""

from __future__ import annotations

import time

import pytest

from train_utils.processes.ending import FIRST_SECONDS, let_others_hear, should_report_error


@pytest.mark.parametrize(("rank", "waits"), [("0", []), ("1", [FIRST_SECONDS])])
def test_other_ranks_let_rank_0_report_first(rank: str, waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher ends rank 0 as soon as another has failed, maybe before it says why."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert should_report_error() == (rank == "0")
    let_others_hear()
    assert slept == waits
