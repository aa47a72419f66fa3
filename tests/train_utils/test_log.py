"""The log and the table of figures."""

from __future__ import annotations

import csv
import re
import warnings
from pathlib import Path

import pytest

from train_utils.errors import TrainError
from train_utils.log import MetricsCsv, RunLog, log_warnings


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


def test_warnings_about_a_subject_go_to_the_log(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        log_warnings(RunLog(tmp_path, is_main=True), "deterministic")
        warnings.warn("scatter does not have a deterministic implementation, but you set ...\nmore", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    log = (tmp_path / "train.log").read_text()
    assert "warning: scatter does not have a deterministic" in log and "something else" not in log
    assert [str(other.message) for other in others] == ["something else"]
