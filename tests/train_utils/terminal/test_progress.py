"""Progress without a terminal: its lines, its silence, and the time that it says is left."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from train_utils.terminal.progress import Progress, fit


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that a test moves."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def move(seconds: float) -> None:
        now[0] += seconds

    return move


@pytest.mark.parametrize(("total", "lines"), [(100, 5), (7, 5), (3, 10), (1, 1), (11, 10)])
def test_progress_lines(total: int, lines: int, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(total, "evaluate", enabled=True, lines=lines) as progress:
        for done in range(1, total + 1):
            progress.at(done, lambda: {"loss": "1.235"})
    said = capsys.readouterr()
    shown = said.err.splitlines()
    assert len(shown) == min(total, lines) and said.out == "", "stdout is for results"
    pattern = rf"evaluate  {total}/{total}  loss 1\.235  \S+ img/s  mem \d+\.\dG  0:00:00 left"
    assert re.fullmatch(pattern, shown[-1])


def test_progress_counts_units(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(13, "evaluate", enabled=True, lines=2)
    for units in (4, 4, 4, 1):
        progress.advance(units)
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["8/13", "13/13"]


@pytest.mark.parametrize(("enabled", "lines"), [(False, 10), (True, 0)])
def test_silent_progress_computes_no_figures(
    enabled: bool, lines: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Progress(4, "x", enabled, lines) as progress:
        for done in range(1, 5):
            progress.at(done, lambda: pytest.fail("a loss is read, which waits for the device"))
    assert capfd.readouterr() == ("", "")


def test_the_time_left_leaves_out_the_start_of_workers(
    wait: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(100, "evaluate", enabled=True, lines=4)
    for done in range(1, 51):
        wait(30 if done == 1 else 2)
        progress.at(done)
    assert progress.pace == 2 and capsys.readouterr().err.splitlines()[-1].endswith("  0:01:40 left")


def test_work_without_a_known_end_is_counted_by_the_clock(
    wait: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress(0, "predict", enabled=True) as progress:
        for _ in range(45):
            wait(0.5)
            progress.advance(1)
    shown = capsys.readouterr().err
    assert re.fullmatch(r"predict  21  2 img/s  mem \S+\npredict  42  2 img/s  mem \S+\n", shown), shown


def test_a_line_keeps_the_parts_that_fit() -> None:
    parts = ["45%", "0:01:02 left", "loss 9.8", "214 img/s"]
    assert fit(parts, 80) == "45%  0:01:02 left  loss 9.8  214 img/s"
    assert fit(parts, 30) == "45%  0:01:02 left  loss 9.8" and fit(parts, 2) == "45%"
