"""Real runs that are killed or stopped resume the same training, even on another world size."""

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from conf.programs import run
from tests.runs.kill_resume import (
    OPTIONS,
    PATIENCE,
    compare,
    finish,
    largest_difference,
    parts_of,
    start,
    start_and_wait,
)
from tests.runs.process_group import fork_context
from train_utils.checkpoint import load_last

pytestmark = pytest.mark.slow


def test_three_processes_killed_at_random_end_as_if_nothing_had_been(tmp_path: Path) -> None:
    """`python -m tests.runs.kill_resume` does the same with more kills (docs/results/)."""
    events, wrong = compare(tmp_path, 3, 2, 1, 0.2, "train.epochs=3", "evaluate.every=2")
    assert wrong == [] and len(events) == 2 and all("rank" in event for event in events), events


def test_a_signal_to_one_rank_stops_all_and_one_process_goes_on_alone(tmp_path: Path) -> None:
    more = ("train.precision=float64", "train.epochs=6", "train.save_every_steps=0", "evaluate.every=0")
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
    before, after = parts_of(whole), parts_of(state)
    assert max(largest_difference(before[part], after[part]) for part in before) <= 1e-9
    torch.testing.assert_close(
        [float(cell) for row in rows(run) for cell in row],
        [float(cell) for row in rows(tmp_path / "whole") for cell in row],
    )


def rows(run: Path) -> list[list[str]]:
    """The losses in metrics.csv."""
    table = run / "metrics.csv"
    return [line.split(",")[2:7] for line in table.read_text().splitlines()[1:]] if table.exists() else []


def train_in_job(step: int, restarts: int, output: str, options: list[str]) -> None:
    """Start a training as `srun --exact -n1 python train.py` does in a job, output in a file."""
    for key in [key for key in os.environ if key.startswith(("SLURM", "RANK", "WORLD", "LOCAL"))]:
        del os.environ[key]
    os.environ |= {"SLURM_JOB_ID": "41", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    os.environ |= {"SLURM_LOCALID": "0", "SLURM_STEP_ID": str(step), "SLURM_STEP_NODELIST": "localhost"}
    os.environ |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
    with open(output, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    sys.argv[1:] = options
    run("train")


def test_two_steps_of_one_job_train_in_two_folders_and_go_on_there_after_a_requeue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are killed halfway; a third that asks for a folder in use gets an error."""
    monkeypatch.chdir(tmp_path)
    mine = [option for option in OPTIONS if not option.startswith(("resume", "train.epochs"))]
    mine += ["data.root=shapes", "data.index_dir=index", "evaluate.every=0"]

    def begin(step: int, *more: str, restarts: int = 0) -> Any:
        process = fork_context().Process(
            target=train_in_job, args=(step, restarts, f"{step}.txt", [*mine, f"optim.lr=0.00{step + 1}", *more])
        )
        process.start()
        return process

    running = [begin(step, "train.epochs=500") for step in (0, 1)]
    runs = [tmp_path / "runs" / "shapes" / name for name in ("slurm-41", "slurm-41-2")]
    until = time.monotonic() + PATIENCE
    while not all(rows(run) for run in runs) and time.monotonic() < until and all(p.is_alive() for p in running):
        time.sleep(0.05)
    assert all(rows(run) for run in runs), [Path(f"{step}.txt").read_text()[-2000:] for step in (0, 1)]
    rates = {run: yaml.safe_load((run / "config.yaml").read_text())["optim"]["lr"] for run in runs}
    refused = begin(2, f"resume={runs[0]}", f"optim.lr={rates[runs[0]]}")
    refused.join(PATIENCE)
    said = Path("2.txt").read_text()
    assert refused.exitcode == 2 and re.search(
        r"^error: resume=\S+slurm-41 is in use by process \d+ on host ", said, re.M
    )
    for process in running:
        process.kill()
        process.join()

    assert sorted(rates.values()) == [0.001, 0.002]
    steps = {run: load_last(run)[0]["step"] for run in runs}
    longer = ["train.epochs=500", "train.timeout_seconds=40"]  # the time-out does not identify a run
    again = [begin(step, *longer, restarts=1) for step in (0, 1)]
    until = time.monotonic() + PATIENCE
    while not all(load_last(run)[0]["step"] > steps[run] for run in runs):
        assert time.monotonic() < until and all(p.is_alive() for p in again)
        time.sleep(0.05)
    for process in again:
        os.kill(process.pid, signal.SIGUSR1)
        process.join(PATIENCE)
    assert [process.exitcode for process in again] == [0, 0]
    for folder in runs:
        assert f"resumed {folder} after epoch" in (folder / "train.log").read_text()
        assert load_last(folder)[0]["config"]["optim"]["lr"] == rates[folder]
        numbers = [line.split(",")[0] for line in (folder / "metrics.csv").read_text().splitlines()[1:]]
        assert numbers == [str(number + 1) for number in range(len(numbers))], "rows of two runs"
    assert sorted(path.name for path in runs[0].parent.iterdir()) == ["slurm-41", "slurm-41-2"]
