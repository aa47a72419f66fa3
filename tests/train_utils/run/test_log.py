"""The log, the table of figures and the progress lines."""

from __future__ import annotations

import csv
import io
import re
import sys
import warnings
from pathlib import Path

import pytest

from train_utils.errors import TrainError
from train_utils.run import log
from train_utils.run.log import MetricsCsv, Progress, RunLog, log_warnings


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_run_log_writes_to_both_on_the_main_process_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunLog(tmp_path, is_main=True).line("one")
    RunLog(tmp_path, is_main=True).line("two \u00e9")  # a resumed run goes on in the same file
    for silent in (None, ""):
        RunLog(tmp_path, is_main=True).line(silent)
    RunLog(tmp_path, is_main=False).line("three")
    RunLog(None, is_main=True).line("four")
    assert capsys.readouterr().out == "one\ntwo \u00e9\nfour\n"
    lines = (tmp_path / "train.log").read_text(encoding="utf-8").splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines)
    assert [line[20:] for line in lines] == ["one", "two \u00e9"]


def test_metrics_keep_every_digit_and_leave_gaps(tmp_path: Path) -> None:
    metrics = MetricsCsv(tmp_path / "m.csv", ("epoch", "loss", "AP"), is_main=True)
    metrics.write({"epoch": 1, "loss": 0.1 + 0.2})
    assert rows(tmp_path / "m.csv") == [{"epoch": "1", "loss": repr(0.1 + 0.2), "AP": ""}]
    with pytest.raises(AssertionError, match="typo"):
        metrics.write({"typo": 1})


def test_metrics_go_on_after_the_resumed_epoch(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    metrics = MetricsCsv(path, ("epoch", "loss"), is_main=True)
    for epoch in range(1, 5):
        metrics.write({"epoch": epoch, "loss": epoch / 10})
    with path.open("a") as file:
        file.write("2,0.")  # cut by a kill: neither an epoch nor a loss to trust
    again = MetricsCsv(path, ("epoch", "loss", "AP"), is_main=True, done=2)
    again.write({"epoch": 3, "loss": 9, "AP": 1})
    assert [tuple(row.values()) for row in rows(path)] == [("1", "0.1", ""), ("2", "0.2", ""), ("3", "9", "1")]
    MetricsCsv(path, ("epoch",), is_main=True)
    assert rows(path) == []


def test_a_full_disk_delays_rows_and_loses_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, kept = tmp_path / "m.csv", tmp_path / "kept.csv"
    metrics = MetricsCsv(path, ("epoch", "loss"), is_main=True)
    metrics.write({"epoch": 1, "loss": 0.5})
    path.rename(kept)
    path.symlink_to("/dev/full")
    for epoch in (2, 3):
        metrics.write({"epoch": epoch, "loss": 0.25})
    assert capsys.readouterr().err.count(f"warning: cannot write {path} (No space left on device)") == 1, (
        "two rows wait"
    )
    path.unlink()
    kept.rename(path)
    metrics.write({"epoch": 4, "loss": 0.1})
    assert [row["epoch"] for row in rows(path)] == ["1", "2", "3", "4"] and capsys.readouterr().err == ""


def test_a_full_disk_does_not_end_a_run_by_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.log").symlink_to("/dev/full")
    run_log = RunLog(tmp_path, is_main=True)
    run_log.line("one")
    run_log.line("two")
    shown = capsys.readouterr()
    assert shown.out == "one\ntwo\n" and shown.err.count("No space left on device") == 1, "told once"


def test_metrics_of_other_processes_touch_nothing(tmp_path: Path) -> None:
    MetricsCsv(tmp_path / "m.csv", ("epoch",), is_main=False).write({"epoch": 1})
    assert list(tmp_path.iterdir()) == []


def test_metrics_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"cannot write .*m\.csv .*fix: "):
        MetricsCsv(tmp_path / "none" / "m.csv", ("epoch",), is_main=True)


@pytest.mark.parametrize(("total", "lines"), [(100, 5), (7, 5), (3, 10), (1, 1), (11, 10)])
def test_progress_lines(total: int, lines: int, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(total, "epoch 1/2", enabled=True, lines=lines)
    for done in range(1, total + 1):
        if progress.due(done):
            progress.show(done, loss=1.23456, lr=0.01)
    progress.close()
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == min(total, lines)
    pattern = rf"epoch 1/2  {total}/{total}  loss 1\.235  lr 0\.01  memory \d+\.\d GB  ETA 0:00:00"
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


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(log, "SECONDS_BETWEEN_UPDATES", 1e9)
    progress = Progress(4, "epoch", enabled=True)
    assert [progress.due(done) for done in range(1, 5)] == [False, False, False, True]
    progress.show(4, loss=0.5)
    progress.close()
    assert "epoch" in terminal.getvalue() and "4/4" in terminal.getvalue()


def test_warnings_about_a_subject_go_to_the_log(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        log_warnings(RunLog(tmp_path, is_main=True), "deterministic")
        warnings.warn("scatter does not have a deterministic implementation, but you set ...\nmore", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    log = (tmp_path / "train.log").read_text()
    assert "warning: scatter does not have a deterministic" in log and "something else" not in log
    assert [str(other.message) for other in others] == ["something else"]
