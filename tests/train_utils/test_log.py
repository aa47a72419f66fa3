"""The log and the tables of metrics."""

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from conf import TrainError
from conf.cli.program import options_of
from tests.small_run import rows
from train_utils.distributed import World
from train_utils.engine import EpochResult
from train_utils.report import run_report
from train_utils.report.run_report import RunReport, open_table
from train_utils.train_state import LOSS_NAMES


def report_of(folder: Path, rank: int, config: Any = None) -> RunReport:
    world = World(rank, rank, 2, 2, 1, torch.device("cpu"), "torchrun")
    return RunReport(folder, config, world)


def test_run_log_writes_to_both_on_the_main_process_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("one", "two \u00e9", None, ""):
        report_of(tmp_path, rank=0).line(text)  # a resumed run goes on in the same file
    report_of(tmp_path, rank=1).line("three")
    assert capsys.readouterr().out == "one\ntwo \u00e9\n"
    lines = (tmp_path / "train.log").read_text(encoding="utf-8").splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines)
    assert [line[20:] for line in lines] == ["one", "two \u00e9"]


def test_metrics_keep_every_digit_and_go_on_after_the_resumed_epoch(tmp_path: Path) -> None:
    path, columns = tmp_path / "metrics.csv", ("epoch", "loss", "AP")
    metrics = open_table(path, columns)
    for epoch in range(1, 5):
        metrics.writerow({"epoch": epoch, "loss": 0.1 + epoch / 5})
    whole = path.read_bytes()
    with path.open("a") as file:
        file.write("2,0.")  # cut by a kill: neither an epoch nor a loss to trust
    again = open_table(path, columns, done=2)
    for epoch in (3, 4):
        again.writerow({"epoch": epoch, "loss": 0.1 + epoch / 5})
    assert path.read_bytes() == whole
    assert rows(tmp_path)[0] == {"epoch": "1", "loss": repr(0.1 + 0.2), "AP": ""}
    open_table(path, ("epoch", "loss_new", "AP", "loss"), done=4)  # a later version
    assert rows(tmp_path)[3] == {"epoch": "4", "loss_new": "", "AP": "", "loss": repr(0.1 + 4 / 5)}
    open_table(path, columns)
    assert rows(tmp_path) == []
    with pytest.raises(TrainError, match=r"cannot write .*metrics\.csv .*fix: "):
        open_table(tmp_path / "none" / "metrics.csv", columns)


def test_a_full_disk_delays_rows_and_lines_and_loses_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, log = open_table(tmp_path / "metrics.csv", ("epoch", "loss")), report_of(tmp_path, rank=0)

    def write(epoch: int) -> None:
        table.writerow({"epoch": epoch, "loss": 0.25})
        log.line(f"line {epoch}")

    write(1)
    paths = [tmp_path / name for name in ("metrics.csv", "train.log")]
    for path in paths:
        path.rename(f"{path}.kept")
        path.symlink_to("/dev/full")  # which is not followed
    for epoch in (2, 3):
        write(epoch)
    shown = capsys.readouterr()
    for path in paths:
        said = f"warning: cannot write {path} (Too many levels of symbolic links)"
        assert shown.err.count(said) == 1, "two lines wait"
        path.unlink()
        Path(f"{path}.kept").rename(path)
    write(4)
    assert [row["epoch"] for row in rows(tmp_path)] == ["1", "2", "3", "4"]
    assert re.findall(r"line \d", (tmp_path / "train.log").read_text()) == ["line 1", "line 2", "line 3", "line 4"]
    assert capsys.readouterr().err == ""


def test_the_time_left_is_that_of_the_epochs_since_a_resume(tmp_path: Path, capsys, monkeypatch) -> None:
    now, config = [100.0], options_of("train", ["data=shapes", "train.epochs=9"])
    monkeypatch.setattr(run_report, "time", SimpleNamespace(monotonic=lambda: now[0], strftime=time.strftime))
    schedule = SimpleNamespace(total_steps=18)
    report, state = report_of(tmp_path, 0, config), cast(Any, SimpleNamespace(epoch=4, step=8, schedule=schedule))
    report.start(config, state, cast(Any, None), cast(Any, None))
    for state.epoch, state.step, now[0] in ((5, 10, 110.0), (6, 12, 140.0)):
        report.epoch(state, EpochResult(0.1, dict.fromkeys(LOSS_NAMES, 1.0), 5.0, 0.0), None, is_best=False)
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]] == ["0:00:40", "0:01:00"]
