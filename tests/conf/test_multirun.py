"""Hydra's -m with real trainings: folders of their own, an exit code, and a stop that ends all."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conf import REPOSITORY
from data import ShapesConfig, ensure_shapes

TINY = [
    "data=shapes", "data.root=shapes", "data.index_dir=index", "data.workers=0", "model=yolov3-tiny",
    "data.shapes={train_images: 4, val_images: 2, image_size: 64, seed: 0}", "model.width=0.125",
    "train.image_size=64", "train.batch_size=4", "train.device=cpu", "evaluate.every=0", "logger.pictures=false",
]  # fmt: skip


@pytest.fixture
def started(tmp_path: Path) -> list[str]:
    """The command of a multirun; its data set is there."""
    ensure_shapes(tmp_path / "shapes", ShapesConfig(train_images=4, val_images=2, image_size=64, seed=0))
    return [sys.executable, str(REPOSITORY / "train.py"), "-m", *TINY]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["basic", "joblib", "submitit_local"])
def test_jobs_have_folders_of_their_own_and_a_failure_is_the_exit_code(
    launcher: str, started: list[str], tmp_path: Path
) -> None:
    side_by_side = ["hydra.launcher.n_jobs=2"] * (launcher == "joblib")
    command = [*started, f"hydra/launcher={launcher}", *side_by_side, "train.epochs=1", "optim.lr=0.01,-1,0.02"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "error: optim.lr must be above 0, got -1" in done.stderr, done.stderr
    tables = [list(csv.DictReader(table.open())) for table in tmp_path.glob("runs/shapes/*/metrics.csv")]
    assert [len(rows) for rows in tables] == [1, 1], "a job is missing, or two wrote to one folder"


@pytest.mark.slow
def test_a_signal_ends_all_jobs_with_a_checkpoint(started: list[str], tmp_path: Path) -> None:
    with (tmp_path / "output.txt").open("wb") as output:
        program = subprocess.Popen(
            [*started, "train.epochs=1000", "train.seed=0,1"], cwd=tmp_path, stdout=output, stderr=output
        )
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("runs/shapes/*/checkpoints/last.pt")) and time.monotonic() < deadline:
            time.sleep(0.05)
        program.send_signal(signal.SIGTERM)
        assert program.wait(timeout=120) == 128 + signal.SIGTERM, (tmp_path / "output.txt").read_text()[-3000:]
    assert len(list(tmp_path.glob("runs/shapes/*"))) == 1, "the next job was started"
