"""Store functions with threads as ranks; test_distributed.py uses real processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from train_utils.errors import DistributedError, SharedError
from train_utils.processes import zero_first
from train_utils.processes.connect import Deadline
from train_utils.processes.store import agree, claim_report
from train_utils.processes.world import World
from train_utils.processes.zero_first import leaders_first

NODES = (0, 0, 0, 1, 1)  # of five ranks
WORLDS = [
    World(rank, rank - NODES.index(node), 5, NODES.count(node), node, 2, torch.device("cpu"), "none", "gloo")
    for rank, node in enumerate(NODES)
]
BUILDERS = [0, 1]  # each node builds for itself


def run_all(body: Callable[[World, dist.Store], object]) -> list[object]:
    """What ``body`` returns or raises on each of five ranks that share a store."""
    shared = dist.HashStore()
    outcomes: list[object] = [None] * len(WORLDS)

    def run(world: World) -> None:
        try:
            outcomes[world.rank] = body(world, shared)
        except BaseException as error:
            outcomes[world.rank] = error

    threads = [threading.Thread(target=run, args=(world,)) for world in WORLDS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    return outcomes


def test_leaders_of_all_nodes_come_before_all_others() -> None:
    order: list[tuple[int, int]] = []

    def body(world: World, shared: dist.Store) -> None:
        for section in range(3):
            with leaders_first(shared, world, BUILDERS):
                if world.rank == 3:
                    time.sleep(0.2)  # everyone waits for the slow leader of another node too
                order.append((section, world.rank))

    assert run_all(body) == [None] * 5
    for section in range(3):
        ranks = [rank for number, rank in order if number == section]
        assert sorted(ranks[:2]) == [0, 3]
        assert sorted(ranks[2:]) == [1, 2, 4]


@pytest.mark.parametrize("failing", [0, 3])
def test_a_failing_leader_fails_everybody_with_one_sentence(failing: int) -> None:
    def body(world: World, shared: dist.Store) -> None:
        with leaders_first(shared, world, BUILDERS):
            assert world.is_local_main, "nobody else may come here"
            if world.rank == failing:
                raise OSError("data.root=/x is missing. fix: set it")

    outcomes = run_all(body)
    assert type(outcomes[failing]) is OSError
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != failing]
    assert {type(outcome) for outcome in others} == {DistributedError}
    assert {str(outcome) for outcome in others} == {f"data.root=/x is missing. fix: set it (OSError on rank {failing})"}


def test_a_failing_leader_has_the_report() -> None:
    def body(world: World, shared: dist.Store) -> bool:
        try:
            with leaders_first(shared, world, BUILDERS):
                time.sleep(0.05)
                raise KeyError("x")
        except (KeyError, DistributedError):
            if world.is_local_main:
                time.sleep(0.2)  # even if the others ask earlier
            return claim_report(shared, world.rank)

    assert sum(map(bool, run_all(body))) == 1


def test_a_dead_leader_ends_the_wait_and_a_slow_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_first, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(zero_first, "DEAD_SECONDS", 0.5)

    def slow(world: World, shared: dist.Store) -> None:
        with leaders_first(shared, world, BUILDERS):
            time.sleep({0: 0.1, 3: 1.5}.get(world.rank, 0))  # node 0 waits for node 1, which is slow

    assert run_all(slow) == [None] * 5

    def dead(world: World, shared: dist.Store) -> None:
        if world.rank == 3:  # never arrives, as if killed before
            return
        with leaders_first(shared, world, BUILDERS):
            assert world.is_local_main

    outcomes = run_all(dead)
    assert {str(outcome) for rank, outcome in enumerate(outcomes) if rank != 3} == {
        "local rank 0 of node 1 gave no sign of life for 0.5 s while others waited for it. "
        "fix: look at its output, and for a lack of memory on its node"
    }


def test_agree_counts_nodes_and_shares_a_problem() -> None:
    assert (
        run_all(lambda world, shared: agree(shared, world.rank, 5, world.is_local_main, None, Deadline(10))) == [2] * 5
    )
    problems = {1: "rank 1 has no GPU", 4: "rank 4 has no GPU"}
    outcomes = run_all(
        lambda world, shared: agree(shared, world.rank, 5, world.is_local_main, problems.get(world.rank), Deadline(10))
    )
    assert {type(outcome) for outcome in outcomes} == {SharedError}
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert str(outcomes[0]) in problems.values()


def test_agree_does_not_wait_for_ever() -> None:
    with pytest.raises(DistributedError, match=r"only 1 of 2 ranks were ready within 0\.1 s"):
        agree(dist.HashStore(), 0, 2, True, None, Deadline(0.1))


def test_a_lost_store_is_one_sentence() -> None:
    class Lost(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("Connection reset by peer\nException raised from sendBytes")

    with pytest.raises(DistributedError, match=r"lost the other processes \(Connection reset by peer\)\. fix: "):
        with leaders_first(Lost(), WORLDS[1], BUILDERS):
            pass
