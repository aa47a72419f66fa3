"""Time shares on made-up numbers, and the clock; tests/runs/test_faults.py uses real processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from train_utils.loop import stragglers
from train_utils.loop.stragglers import COSTLY, ENOUGH_STEPS, RankTable, RankTimes, slowest_rank, straggler_sentence
from train_utils.parallel.wait_clock import WaitClock
from train_utils.parallel.wrap import _time_layer


def test_shares_add_up_and_compute_is_what_is_left() -> None:
    times = RankTimes(seconds=50.0, data=10.0, wait=15.0)
    assert times.compute == 25 and times.own == 35
    assert times.shares() == {"data": 0.2, "compute": 0.5, "wait": 0.3}
    assert RankTimes(10, 7, 6).compute == 0, "device and host waited at once"
    assert RankTimes(0, 0, 0).shares() == {"data": 0, "compute": 0, "wait": 0}


def test_equal_ranks_and_a_single_one_have_no_straggler() -> None:
    alike = [RankTimes(100, 5, 20 + noise) for noise in (0, 3, -4, 5)]
    found = slowest_rank(alike)
    assert found is not None and 0 < found.cost < COSTLY and straggler_sentence(alike) is None
    assert slowest_rank([RankTimes(100, 90, 0)]) is None and straggler_sentence([RankTimes(100, 90, 0)]) is None
    assert straggler_sentence([]) is None  # as on all ranks but the first


def test_the_slowest_rank_is_named_with_its_node_its_cause_and_its_cost() -> None:
    by_data = [
        RankTimes(100, 5, 45, "a"),
        RankTimes(100, 5, 41, "a"),
        RankTimes(100, 48, 2, "b"),
        RankTimes(100, 4, 46),
    ]
    found = slowest_rank(by_data)
    assert found is not None and (found.rank, found.by_data) == (2, True) and found.cost == pytest.approx(0.43)
    line = straggler_sentence(by_data)
    assert line is not None and "rank 2 on b is slow and costs 43% of the time" in line
    assert "waits for its batches 48% of the time, they 5%" in line and "fix: " in line and "data.workers" in line
    by_compute = [RankTimes(100, 5, 1, "a"), RankTimes(100, 9, 21, "b")]
    line = straggler_sentence(by_compute)
    assert line is not None and "rank 0 on a is slow and costs 20%" in line and "computes 94% of the time" in line


def test_a_cost_at_the_limit_is_not_told() -> None:
    assert straggler_sentence([RankTimes(100, 0, 0), RankTimes(100, 0, 10)]) is None
    assert straggler_sentence([RankTimes(100, 0, 0), RankTimes(100, 0, 11)]) is not None


def test_the_table_of_one_process(tmp_path: Path) -> None:
    said: list[str | None] = []
    table = RankTable(tmp_path / "ranks.csv", True, 0, said.append)
    table.write(1, RankTimes(10, 2.5, 0, steps=ENOUGH_STEPS))
    header, row = (tmp_path / "ranks.csv").read_text().splitlines()
    assert header == "epoch,rank,node,seconds,data,compute,wait"
    assert row.split(",")[:2] == ["1", "0"] and row.split(",")[3:] == ["10.0", "0.25", "0.75", "0.0"]
    assert said == [None]


def test_a_rank_is_judged_by_enough_steps_of_one_epoch_or_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In short epochs, one slow epoch may be chance; slow in all of them is reported."""
    said: list[str | None] = []
    table = RankTable(tmp_path / "ranks.csv", True, 0, said.append)

    def epoch(number: int, steps: int, *own: float) -> None:
        times = [RankTimes(10, seconds, 10 - seconds, "a", steps) for seconds in own]
        monkeypatch.setattr(stragglers, "gather_times", lambda _: times)
        table.write(number, times[0])

    few = ENOUGH_STEPS // 3 + 1
    epoch(1, few, 1, 9)
    epoch(2, few, 9, 1)
    assert said == []
    epoch(3, few, 5, 5)
    assert said == [None], "they are alike on the whole"
    for number in (4, 5, 6):
        epoch(number, few, 5, 9)
    assert said[1:] == [said[-1]] and said[-1] is not None and "rank 1 on a is slow and costs 40%" in said[-1]
    epoch(7, ENOUGH_STEPS, 9, 5)
    assert said[-1] is not None and "rank 0 on a is slow" in said[-1]
    assert (tmp_path / "ranks.csv").read_text().count("\n") == 1 + 7 * 2, "the table has all"


def test_the_clock_counts_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = WaitClock(torch.device("cpu"))

    def work(seconds: float) -> str:
        nonlocal now
        now += seconds
        return "done"

    work(1)
    assert clock.timed(work)(2) == "done"
    with clock:
        work(3)
    clock.end()  # nothing began
    clock.begin("whatever a hook gets")
    work(4)
    clock.end()
    work(5)
    clock.end()
    clock.read_device()
    assert clock.seconds == 9
    clock.restart()
    assert clock.seconds == 0


class FakeEvent:
    """A device event; the device's queue reaches to ``queued`` ms and is done up to ``done`` ms."""

    queued = done = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeEvent.queued

    def query(self) -> bool:
        return self.at <= FakeEvent.done

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.query() and other.query(), "CUDA raises an error"
        return other.at - self.at


def test_on_cuda_each_span_counts_once_the_device_has_passed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    clock = WaitClock(torch.device("cuda"))
    for milliseconds in (500.0, 250.0):
        FakeEvent.queued += 1000
        clock.begin()
        FakeEvent.queued += milliseconds
        clock.end()
    clock.end()
    for FakeEvent.done, seconds in ((1499, 0), (1500, 0.5), (2700, 0.5), (2750, 0.75), (9000, 0.75)):
        clock.read_device()
        assert clock.seconds == seconds


@pytest.mark.gpu
def test_on_a_real_gpu_a_span_is_read_once_it_has_passed() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    clock = WaitClock(torch.device("cuda"))
    clock.begin()
    torch.cuda._sleep(10**9)  # cycles
    clock.end()
    clock.read_device()
    assert clock.seconds == 0, "this does not wait"
    torch.cuda.synchronize()
    clock.read_device()
    assert clock.seconds > 0.1


class Recorder(WaitClock):
    """Records the order of its calls."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__(torch.device("cpu"))
        self.calls = calls

    def begin(self, *_: object) -> None:
        self.calls.append("begin")

    def end(self, *_: object) -> None:
        self.calls.append("end")


def gradients(prepare: Callable[[nn.Module], object]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LeakyReLU(0.1, inplace=True), nn.Conv2d(4, 2, 3))
    prepare(layers[1])
    layers(torch.randn(2, 3, 8, 8)).square().sum().backward()
    with torch.no_grad():
        layers(torch.randn(2, 3, 8, 8))
    return [parameter.grad for parameter in layers.parameters() if parameter.grad is not None]


def test_a_timed_layer_computes_the_same_and_is_enclosed_in_both_passes() -> None:
    calls: list[str] = []
    plain, timed = gradients(lambda _: None), gradients(lambda layer: _time_layer(layer, Recorder(calls)))
    assert len(plain) == 6 and all(torch.equal(a, b) for a, b in zip(plain, timed, strict=True))
    assert calls == ["begin", "end"] * 3, "forward, backward, and a pass without gradients"
