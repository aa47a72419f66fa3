"""Real processes that are killed or asked to stop, and go on: the same training, also on another number of them."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.kill_resume import PATIENCE, compare, differences, finish, start, start_and_wait
from train_utils.checkpoint import load_last

pytestmark = pytest.mark.slow


def test_three_processes_killed_at_random_end_as_if_nothing_had_been(tmp_path: Path) -> None:
    """`python -m tests.kill_resume` does the same with more kills (docs/results.md)."""
    events, wrong = compare(tmp_path, 3, 2, 1, 0.2, "train.epochs=3", "evaluate.every=2")
    assert wrong == [] and len(events) == 2 and all("rank" in event for event in events), events


def test_a_signal_to_one_rank_stops_all_and_one_process_goes_on_alone(tmp_path: Path) -> None:
    more = ("train.precision=float32", "train.epochs=6", "train.save_every_steps=0", "evaluate.every=0")
    more += ("train.deterministic=true", "train.cudnn_benchmark=false")
    assert finish(start(tmp_path / "whole", 1, *more), PATIENCE)
    run = tmp_path / "run"
    processes = start_and_wait(run, 2, *more)
    time.sleep(0.5)
    os.kill(processes[1].pid, signal.SIGUSR1)
    assert finish(processes, PATIENCE), Path(f"{run}.txt").read_text()[-3000:]
    stops = re.findall(r"stopped at step (\d+) by SIGUSR1", (run / "train.log").read_text())
    whole, stopped = load_last(tmp_path / "whole")[0], load_last(run)[0]
    assert stops == [str(stopped["step"])] and 0 < stopped["step"] < whole["step"]
    assert finish(start(run, 1, *more), PATIENCE), Path(f"{run}.txt").read_text()[-3000:]
    state = load_last(run)[0]
    assert state["step"] == whole["step"] and state["seen"] == whole["seen"]
    for part in ("model", "ema", "optimizer"):
        assert differences(whole[part], state[part]) == []
    torch.testing.assert_close(
        [float(cell) for row in rows(run) for cell in row],
        [float(cell) for row in rows(tmp_path / "whole") for cell in row],
    )


def rows(run: Path) -> list[list[str]]:
    """The losses of metrics.csv."""
    return [line.split(",")[2:7] for line in (run / "metrics.csv").read_text().splitlines()[1:]]
