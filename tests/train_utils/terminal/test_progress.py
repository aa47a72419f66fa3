"""Progress on a terminal of a given size, without one, and through the epochs of a training."""

from __future__ import annotations

import re

import pytest

from train_utils.terminal.progress import Progress, fit


@pytest.mark.parametrize(("total", "lines"), [(100, 5), (7, 5), (3, 10), (1, 1), (11, 10)])
def test_progress_lines(total: int, lines: int, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(total, "evaluate", enabled=True, lines=lines) as progress:
        for done in range(1, total + 1):
            if progress.due(done):
                progress.show(done, loss=1.23456)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == min(total, lines)
    pattern = rf"evaluate  {total}/{total}  loss 1\.235  \S+ img/s  mem \d+\.\dG  0:00:00 left"
    assert re.fullmatch(pattern, shown[-1])


def test_progress_counts_units(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(13, "evaluate", enabled=True, lines=2)
    for units in (4, 4, 4, 1):
        progress.advance(units)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["8/13", "13/13"]


@pytest.mark.parametrize(("enabled", "lines"), [(False, 10), (True, 0)])
def test_silent_progress(enabled: bool, lines: int, capfd: pytest.CaptureFixture[str]) -> None:
    progress = Progress(4, "x", enabled, lines)
    assert not any(progress.due(done) for done in range(1, 5))
    progress.advance(4)
    progress.close()
    assert capfd.readouterr() == ("", "")


def test_a_line_keeps_the_parts_that_fit() -> None:
    parts = ["45%", "0:01:02 left", "loss 9.8", "214 img/s"]
    assert fit(parts, 80) == "45%  0:01:02 left  loss 9.8  214 img/s"
    assert fit(parts, 30) == "45%  0:01:02 left  loss 9.8" and fit(parts, 2) == "45%"
