"""A wait for the device that a lost peer leaves: made-up communicators, and NCCL's on a GPU."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.train_utils.processes import test_lost_peers
from tests.train_utils.processes.test_lost_peers import lookouts
from tests.train_utils.processes.test_rendezvous import MemoryStore
from train_utils import distributed
from train_utils.launch.environment import leave_failures_of_nccl
from train_utils.processes import communicators, lost_peers
from train_utils.processes.communicators import CollectiveError, CommunicatorWatch
from train_utils.processes.ending import ending
from train_utils.processes.lost_peers import Lookout
from train_utils.processes.process_group import NcclCommunicators

fast = test_lost_peers.fast
ANSWER_SECONDS, LOOK_SECONDS = lost_peers.ANSWER_SECONDS, lost_peers.LOOK_SECONDS  # before ``fast``
TIMEOUT = "NCCL reports TIMEOUT"


@pytest.fixture(autouse=True)
def no_alarm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The limit on the exit of the process is not for this one."""
    yield
    atexit.unregister(signal.alarm)


class Device:
    """A device whose collectives never end unless aborted; ``stuck``: not even then."""

    def __init__(self, stuck: bool = False) -> None:
        self.reason: str | None = None
        self.done, self.aborted, self._stuck = threading.Event(), threading.Event(), stuck

    def failure(self) -> str | None:
        return self.reason

    def abort(self) -> None:
        self.aborted.set()
        if self._stuck:
            threading.Event().wait(60)
        self.done.set()


def wait_and_exchange(device: Device, watch: CommunicatorWatch, lookout: Lookout, said: list[str]) -> None:
    """What the main thread of a rank does at the end of a step."""
    assert device.done.wait(20)
    try:
        watch.check()
    except CollectiveError as error:
        said.append(str(lookout.explain(error, (CollectiveError,))))
        lookout.let_others_hear()


def test_survivors_leave_their_waits_and_one_names_the_lost_rank() -> None:
    watching = lookouts(MemoryStore(), 0, 1, 3)  # rank 2 is lost
    devices = [Device() for _ in watching]
    watches = [CommunicatorWatch(*pair) for pair in zip(devices, watching, strict=True)]
    said: list[str] = []
    threads = [
        threading.Thread(target=wait_and_exchange, args=(*each, said))
        for each in zip(devices, watches, watching, strict=True)
    ]
    for thread in threads:
        thread.start()
    watches[0].check()
    devices[1].reason = TIMEOUT  # on one rank only: the others hear of it
    for thread in threads:
        thread.join()
    assert all(device.aborted.is_set() for device in devices)
    lost = f"lost rank 2 (node 1, b): no sign of life after a collective failed ({TIMEOUT}). {lost_peers.FIX}"
    other = "lost another process (another process reported an error), as was reported"
    assert sorted(said) == sorted([lost, other, other])
    for lookout, watch in zip(watching, watches, strict=True):
        lookout.close()
        watch.close()


def test_an_error_of_another_rank_ends_the_wait_of_this_one() -> None:
    store = MemoryStore()
    first, second = lookouts(store, 0, 1)
    device = Device()
    watch = CommunicatorWatch(device, second)
    assert first.claim() and device.done.wait(20)
    with pytest.raises(CollectiveError, match="another process reported an error"):
        watch.check()


def test_a_rank_that_fails_by_itself_aborts_nothing() -> None:
    (lookout,) = lookouts(MemoryStore(), 0)
    device = Device()
    watch = CommunicatorWatch(device, lookout)
    assert lookout.claim()
    watch.close()
    assert not device.aborted.is_set()


def test_where_the_abort_frees_nobody_the_thread_reports_and_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(communicators, "FREE_SECONDS", 0.1)
    ended = threading.Event()
    store = MemoryStore()
    lookout, *_ = lookouts(store, 0, 1, 2, end=ended.set)
    device = Device(stuck=True)
    CommunicatorWatch(device, lookout)
    device.reason = TIMEOUT
    assert ended.wait(20) and not device.done.is_set()
    assert f"error: lost rank 3 (node 1, b): no sign of life after a collective failed ({TIMEOUT})" in (
        capsys.readouterr().err
    )


def test_it_is_told_in_time() -> None:
    """From the time-out of a collective to the end of a process whose abort frees nobody."""
    seconds = (communicators.FREE_SECONDS, ANSWER_SECONDS, 2 * LOOK_SECONDS)
    assert sum(seconds) < lost_peers.TELL_SECONDS


EXCHANGES: dict[str, Callable[[], object]] = {
    "barrier": distributed.barrier,
    "sum": lambda: distributed.sum_over_ranks(torch.ones(2)),
    "max": lambda: distributed.max_over_ranks([1]),
    "stack": lambda: distributed.stack_over_ranks(torch.ones(2)),
    "text": lambda: distributed.broadcast_text("a"),
    "module": lambda: distributed.broadcast_module(nn.Linear(1, 1)),
    "arrays": lambda: distributed.gather_arrays(np.ones(2)),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_no_exchange_takes_what_an_aborted_one_left(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)

    def refuse() -> None:
        raise CollectiveError(TIMEOUT)

    monkeypatch.setattr(ending, "watch", SimpleNamespace(check=refuse))
    with pytest.raises(CollectiveError, match=TIMEOUT):
        EXCHANGES[name]()


def test_what_nccl_reports_is_read_from_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(name="SUCCESS")
    backend = SimpleNamespace(get_error=lambda: state)
    group = SimpleNamespace(WORLD=SimpleNamespace(_get_backend=lambda device: backend))
    monkeypatch.setattr(dist, "group", group)
    found = NcclCommunicators(torch.device("cuda", 0))
    assert found.failure() is None
    state.name = "TIMEOUT"
    assert found.failure() == TIMEOUT


def test_the_watchdog_of_torch_is_silenced_even_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun's agent does
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    leave_failures_of_nccl()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"


@pytest.mark.gpu
def test_nccl_reports_no_failure_and_can_be_aborted() -> None:
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        pytest.skip("no CUDA device with NCCL")
    device = torch.device("cuda", 0)
    leave_failures_of_nccl()
    store = dist.HashStore()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, timeout=timedelta(seconds=30), device_id=device
    )
    try:
        number = torch.ones(1, device=device)
        dist.all_reduce(number)
        found = NcclCommunicators(device)
        assert number.tolist() == [1.0] and found.failure() is None
        aborted = threading.Thread(target=found.abort, daemon=True)
        aborted.start()
        aborted.join(20)
        assert not aborted.is_alive()
        with pytest.raises(RuntimeError):
            dist.all_reduce(number)
    finally:
        dist.destroy_process_group()
