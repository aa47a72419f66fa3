"""The sbatch scripts on a real SLURM of two nodes; skipped where none runs (.ci/run starts one)."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data import ShapesConfig, ensure_shapes

REPOSITORY = Path(__file__).resolve().parent.parent
SECONDS = 240.0


def answer(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout


def slurm_is_up() -> bool:
    if shutil.which("sinfo") is None:
        return False
    nodes = subprocess.run(["sinfo", "-h", "-t", "idle", "-N"], capture_output=True, text=True, timeout=30)
    return nodes.returncode == 0 and len(nodes.stdout.split("\n")) > 2


pytestmark = [
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.skipif(not slurm_is_up(), reason="no SLURM with two idle nodes"),
]


@pytest.mark.parametrize(
    ("script", "shape"),
    [("train.sbatch", ["--gpus-per-node=2"]), ("train_srun.sbatch", ["--ntasks-per-node=2", "--gpus-per-node=2"])],
)
def test_two_nodes_of_two_processes_train_one_run(script: str, shape: list[str], tmp_path: Path) -> None:
    """From another folder, with spaces in an option's value; the nodes' GPUs are stand-ins, so on the CPU."""
    ensure_shapes(tmp_path / "drawn shapes", ShapesConfig(train_images=16, val_images=5, image_size=64, seed=0))
    job = answer(
        "sbatch", "--parsable", "--nodes=2", "--cpus-per-task=2", f"--chdir={tmp_path}", f"--output={tmp_path}/job.out",
        f"--export=ALL,REPO={REPOSITORY},PYTHON={sys.executable},OMP_NUM_THREADS=1", *shape,
        str(REPOSITORY / "scripts" / "slurm" / script), "data=shapes", f"data.root='{tmp_path}/drawn shapes'",
        "data.shapes={train_images: 16, val_images: 5, image_size: 64, seed: 0}", "data.workers=0",
        f"data.index_dir={tmp_path}/index", "model=yolov3-tiny", "model.width=0.125", "train.image_size=64",
        "train.batch_size=8", "train.epochs=1", "train.device=cpu", f"run_dir={tmp_path}/run", "logger.pictures=false",
    ).strip()  # fmt: skip
    end = time.monotonic() + SECONDS
    state = ""
    while state not in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT") and time.monotonic() < end:
        time.sleep(1)
        found = re.search(r"JobState=(\w+)", answer("scontrol", "show", "job", job))
        state = found[1] if found else ""
    if state in ("RUNNING", "PENDING"):
        answer("scancel", job)
    said = (tmp_path / "job.out").read_text()
    assert state == "COMPLETED", said
    assert said.count("4 processes x 2 images x 1 passes") == 1, "the processes did not form one run"
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["2"]
