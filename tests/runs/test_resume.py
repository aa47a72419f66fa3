"""Real runs that are killed or stopped resume the same training, even on another world size."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.runs.kill_resume import PATIENCE, compare, finish, largest_difference, parts_of, start_and_wait, train_well
from tests.small_run import rows
from train_utils.checkpoint import load_last
from train_utils.train_state import LOSS_NAMES


def test_two_processes_killed_at_random_end_as_if_nothing_had_been(tmp_path: Path) -> None:
    events, wrong = compare(tmp_path, 2, 2, 1, 0.2, "train.epochs=3", "evaluate.every=2")
    assert wrong == [] and len(events) == 2 and all("rank" in event for event in events), events


@pytest.mark.release
def test_a_signal_to_one_rank_stops_all_and_one_process_goes_on_alone(tmp_path: Path) -> None:
    more = ("train.precision=float64", "train.epochs=6", "train.save_every_steps=0", "evaluate.every=0")
    whole_run, run = tmp_path / "whole", tmp_path / "run"
    train_well(whole_run, 1, *more)
    processes = start_and_wait(run, 2, *more)
    time.sleep(0.5)
    os.kill(processes[1].pid, signal.SIGUSR1)
    assert finish(processes, PATIENCE), Path(f"{run}.txt").read_text()[-3000:]
    stops = re.findall(r"stopped at step (\d+) by SIGUSR1", (run / "train.log").read_text())
    whole, stopped = load_last(whole_run)[0], load_last(run)[0]
    assert stops == [str(stopped["step"])] and 0 < stopped["step"] < whole["step"]
    train_well(run, 1, *more)
    state = load_last(run)[0]
    assert state["step"] == whole["step"] and state["seen"] == whole["seen"]
    before, after = parts_of(whole), parts_of(state)
    assert max(largest_difference(before[part], after[part]) for part in before) <= 1e-9
    tables = [[[float(row[name]) for name in LOSS_NAMES] for row in rows(path)] for path in (run, whole_run)]
    assert len(tables[0]) == len(tables[1]) == 6
    torch.testing.assert_close(*tables)
