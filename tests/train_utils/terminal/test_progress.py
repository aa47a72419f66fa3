"""Progress without a terminal: its lines, its silence, and the time that it says is left."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from train_utils.terminal.progress import Progress, fit
from train_utils.terminal.screen import columns


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


def test_a_cell_of_a_notebook_has_one_line_that_changes(
    wait: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[list[str]] = []  # what stood in the line of each cell
    shell = SimpleNamespace(kernel=None, execution_count=1)

    def display(content: dict[str, str], raw: bool, display_id: bool) -> SimpleNamespace:
        shown.append([content["text/plain"]])
        return SimpleNamespace(update=lambda content, raw, line=shown[-1]: line.append(content["text/plain"]))

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    for cell, title in ((1, "train"), (1, "evaluate"), (2, "again")):
        shell.execution_count = cell
        with Progress(10, title, enabled=True) as progress:
            for done in range(1, 10):
                wait(0.2)
                progress.at(done)
    assert [len(line) for line in shown] == [9, 5] and capsys.readouterr() == ("", "")
    assert [line[-1] for line in shown] == ["", ""], "cleared at the end"
    assert shown[0][1].startswith("train  3/10  ") and shown[0][5].startswith("evaluate  3/10  ")
    assert columns() == 100
    shell.__dict__.pop("kernel")  # IPython in a terminal
    assert columns() is None
