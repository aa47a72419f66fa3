"""Who is named when a rank is lost: lookouts on a store in memory, and real processes."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs.process_group import fork_context, free_port
from tests.train_utils.processes.test_rendezvous import MemoryStore
from train_utils.errors import DistributedError
from train_utils.launch.nodes import Peer
from train_utils.processes import lost_peers
from train_utils.processes.lost_peers import Lookout, loss_in
from train_utils.processes.rendezvous import Rendezvous
from train_utils.processes.reporter_lock import ReporterLock

RENDEZVOUS = Rendezvous(1, "token", tuple(Peer(rank, rank // 2, "ab"[rank // 2], rank % 2, 2) for rank in range(4)))
RESET = RuntimeError("[/x/gloo/transport/tcp/pair.cc:1] Read error [::1]:5: Connection reset by peer. This is. More\nx")
REASON = "Read error [::1]:5: Connection reset by peer"


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(lost_peers, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(lost_peers, "QUICK_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(lost_peers, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def lookouts(store: MemoryStore, *ranks: int, end: Any = None) -> list[Lookout]:
    locks = [ReporterLock(RENDEZVOUS.token) for _ in ranks]
    for lock in locks:
        lock.settle()
    return [
        Lookout(store, rank, RENDEZVOUS, lock, "the store at 10.0.0.1:5", True, 30, end or (lambda: None))
        for rank, lock in zip(ranks, locks, strict=True)
    ]


def explain_all(watching: list[Lookout]) -> list[str]:
    """The error of each rank when all notice a loss at the same time."""
    found: dict[int, str] = {}

    def ask(number: int, lookout: Lookout) -> None:
        found[number] = str(lookout.explain(RESET, ()))
        lookout.let_others_hear()

    threads = [threading.Thread(target=ask, args=pair) for pair in enumerate(watching)]
    for thread in threads:
        thread.start()
        time.sleep(0.01)
    for thread in threads:
        thread.join()
    return [found[number] for number in range(len(watching))]


def test_errors_that_are_no_loss_stay_as_they_are() -> None:
    (lookout,) = lookouts(MemoryStore(), 0)
    error = ValueError("gloo/")
    assert lookout.explain(error, ()) is error
    lookout.close()
    wrapped = DistributedError("outer")
    wrapped.__cause__ = RESET
    assert loss_in(wrapped, ()) == loss_in(RESET, ()) == REASON
    assert loss_in(RuntimeError("the loss is lost"), ()) is None
    assert loss_in(KeyError("anything"), (KeyError,)) == "'anything'"


def test_the_rank_without_a_sign_of_life_is_named_by_one_survivor() -> None:
    said = explain_all(lookouts(MemoryStore(), 0, 1, 3))
    assert said[0] == f"lost rank 2 (node 1, b): no sign of life after a collective failed ({REASON}). {lost_peers.FIX}"
    assert said[1:] == [f"lost another process ({REASON}), as was reported"] * 2


def test_a_rank_that_lives_but_does_not_come_is_named_as_late() -> None:
    store = MemoryStore()
    watching = lookouts(store, 0, 1, 2, 3)
    said = explain_all(watching[:3])
    assert said[0].startswith("rank 3 (node 1, b) did not come to a collective within 30 s, though alive")
    again = explain_all(watching)
    assert again[3].startswith("lost another process"), "it hears that the error is told"


def test_the_error_of_another_rank_is_told_once_even_where_the_store_ends_with_it() -> None:
    store = MemoryStore()
    first, second = lookouts(store, 0, 1)
    assert first.claim() and first.claim()
    os.kill(os.getpid(), signal.SIGTERM)  # as launchers do; it must not cut the report short
    first.let_others_hear()
    store.blocked.set()
    assert not second.claim()


def test_without_the_store_one_process_of_each_node_names_the_other_node(tmp_path: Path) -> None:
    store = MemoryStore()
    watching = lookouts(store, 2, 3)
    time.sleep(0.1)
    store.blocked.set()
    said = explain_all(watching)
    assert said[0] == (
        f"rank 2 (node 1, b) can reach neither the store at 10.0.0.1:5 nor ranks 0, 1 (node 0, a) ({REASON}). "
        f"{lost_peers.FIX}"
    )
    assert said[1].startswith("lost another process")
    assert list(tmp_path.iterdir()) == [], "nothing stays in the temporary folder"


@pytest.mark.parametrize("folder", ["missing", "read-only"])
def test_a_temporary_folder_that_cannot_be_written_does_not_silence_anyone(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then every rank reports. A file plays the folder, because root may write anywhere."""

    def nowhere() -> str:
        if folder == "missing":
            raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")
        return str(tmp_path / "file")

    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    store = MemoryStore()
    watching = lookouts(store, 2, 3)
    time.sleep(0.1)
    store.blocked.set()
    said = explain_all(watching)
    assert all("can reach neither the store" in sentence for sentence in said)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_the_loss_of_the_store_within_a_node_is_that_of_the_rank_that_held_it() -> None:
    store = MemoryStore()
    watching = lookouts(store, 1)
    time.sleep(0.1)
    store.blocked.set()
    (sentence,) = explain_all(watching)
    assert sentence.startswith(f"lost rank 0 (node 0, a), which held the store at 10.0.0.1:5 ({REASON}). fix:")


def test_a_process_that_stays_behind_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_peers, "END_SECONDS", 0.1)
    store, ended = MemoryStore(), threading.Event()
    lookouts(store, 1, end=ended.set)
    (reporter,) = lookouts(store, 0, end=lambda: pytest.fail("ended the one that reports"))
    assert not ended.wait(0.3) and reporter.claim()
    assert ended.wait(5)


def exchange(rank: int, world_size: int, port: int, how: str, folder: str, found: Any) -> None:
    """Sum numbers until a rank is hit, then report the error."""
    from train_utils import distributed
    from train_utils.processes.ending import let_others_hear, name_lost_peers, should_report_error

    for key in [key for key in os.environ if key.startswith("SLURM")]:
        del os.environ[key]
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {key: str(value) for key, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    tempfile.tempdir = folder
    distributed.init_distributed_mode("cpu", 4)
    started = time.monotonic()
    try:
        for step in range(10**6):
            if step == 3 and rank == (0 if how == "holder" else world_size - 1):
                if how == "error":
                    raise ValueError("a bad image")
                os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
            started = time.monotonic()
            distributed.sum_over_ranks(torch.ones(1))
    except Exception as error:
        named = name_lost_peers(error)
        if should_report_error():
            found.put((rank, f"{type(named).__name__}: {named}", time.monotonic() - started))
        let_others_hear()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped", "holder", "error"])
def test_survivors_name_the_rank_once_and_end(how: str, tmp_path: Path) -> None:
    context = fork_context()
    found: Any = context.Queue()
    port = free_port()
    processes = [context.Process(target=exchange, args=(rank, 3, port, how, str(tmp_path), found)) for rank in range(3)]
    for process in processes:
        process.start()
    try:
        rank, sentence, seconds = found.get(timeout=120)
        for process in processes if how != "stopped" else processes[:2]:
            process.join(30)
            assert not process.is_alive()
        with pytest.raises(queue.Empty):
            found.get(timeout=0.2)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert not list(tmp_path.glob("hydra*")), "nothing of ours stays in the temporary folder, not even after a kill"
    if how == "error":
        assert (rank, sentence) == (2, "ValueError: a bad image")
    elif how == "holder":
        assert sentence.startswith("DistributedError: lost rank 0 (node 0, ") and "which held the store at" in sentence
    else:
        assert rank in (0, 1) and sentence.startswith("DistributedError: lost rank 2 (node 0, "), sentence
        assert seconds < 30  # 4 for the time-out, 4 for answers, more on a busy machine


def _stop_a_child_and_end(told: Any) -> None:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    os.kill(child.pid or 0, signal.SIGSTOP)
    told.put(child.pid)
    time.sleep(0.5)
    lost_peers.end_now()


def test_a_process_that_is_ended_takes_its_hanging_worker_along() -> None:
    context = fork_context()
    told: multiprocessing.Queue[int] = context.Queue()
    process = context.Process(target=_stop_a_child_and_end, args=(told,))
    process.start()
    worker = told.get(timeout=60)
    process.join(30)
    assert process.exitcode == 1
    until = time.monotonic() + 5
    while _lives(worker) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _lives(worker)


def _lives(process: int) -> bool:
    """Whether the process runs or is stopped; a zombie does not count."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
