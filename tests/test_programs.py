"""The programs as users start them: real processes and launchers, and none says a warning.

`make lowest` runs this file with the oldest packages that pyproject.toml allows.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from conf import REPOSITORY
from conf.cli.from_checkpoint import complete_from_checkpoint
from conf.compose import compose
from conf.schema import EvalConfig
from data import ShapesConfig, ensure_shapes
from eval import evaluate
from tests.runs.process_group import run_group
from tests.small_run import rows
from train_utils.coco_eval import METRICS
from train_utils.report.run_report import TABLES

pytestmark = pytest.mark.release
Finished = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a drawn set, whose 13 validation images divide evenly among neither 2 nor 3."""
    path = tmp_path_factory.mktemp("programs")
    ensure_shapes(path / "shapes", ShapesConfig(train_images=35, val_images=13, image_size=64))
    return path


@pytest.fixture(scope="module")
def trained(folder: Path) -> Finished:
    """A training on two processes that it starts itself, with accumulation."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "RANK", "WORLD"))}
    environment.pop("OMP_NUM_THREADS", None)
    environment["PYTHONWARNINGS"] = "error::FutureWarning,error::DeprecationWarning"
    options = [
        "data=shapes", "data.root=shapes", "data.workers=1", "model=yolov3-tiny", "run_dir=run", "devices=2",
        "data.shapes={train_images: 35, val_images: 13, image_size: 64}", "model.width=0.125", "train.image_size=64",
        "train.batch_size=8", "train.micro_batch_size=4", "train.epochs=2", "evaluate.batch_size=4",
    ]  # fmt: skip
    command = [sys.executable, str(REPOSITORY / "train.py"), *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower(), done.stdout + done.stderr
    assert "2 processes on cpu (torchrun)" in done.stdout or torch.cuda.is_available()
    return done


def test_training_on_two_processes_leaves_one_whole_run_folder(folder: Path, trained: Finished) -> None:
    run = folder / "run"
    assert {"config.yaml", "train.log", "metrics.csv", "plots"} <= {path.name for path in run.iterdir()}
    assert "# train.precision: auto is " in (run / "config.yaml").read_text()
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"last.pt", "last.previous.pt", "best.pt"}
    assert not (folder / "outputs").exists() and not (folder / ".hydra").exists(), "Hydra made a folder of its own"
    table = rows(run)
    assert tuple(table[0]) == TABLES["metrics"] and {"epoch", "step", "lr", "AP", "AP50"} < set(table[0])
    assert [(row["epoch"], row["step"]) for row in table] == [("1", "4"), ("2", "8")]
    assert trained.stdout.count("2 ranks x 2 images x 2 passes") == 1, "more than one process printed"
    assert "APm" in trained.stdout, "no table at the end"
    ours = [line for line in trained.stdout.splitlines() if "[Gloo]" not in line]  # as torch 2.10 says
    assert [line for line in ours if len(line) > 80] == [], "a terminal has 80 columns"
    assert "  python eval.py ckpt=run\n" in trained.stdout, "paths below the current folder are short"


def score_here(folder: Path, threads: int, options: list[str]) -> None:
    os.chdir(folder)
    torch.set_num_threads(threads)
    evaluate(compose("eval", EvalConfig, options, complete_from_checkpoint))


def test_a_checkpoint_scores_the_same_to_the_last_bit_on_any_number_of_processes(folder, trained) -> None:
    last, saved = rows(folder / "run")[-1], []
    for processes, threads in ((1, 2), (3, 1)):  # the training scored on two
        out = folder / f"eval{processes}"
        run_group(score_here, processes, folder, threads, ["ckpt=run/checkpoints/last.pt", f"out={out}"])
        saved.append(results(out))
    assert saved[0] == saved[1]
    assert saved[0][0] == {name: float(last[name]) for name in METRICS}, "not what training measured"
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    options = ["ckpt=../run/checkpoints/last.pt", "out=eval7", "evaluate.batch_size=7"]
    run_group(score_here, 1, elsewhere, 1, options)
    # Scores, and so thresholds, move in their last digit with the number of images in a batch.
    assert results(elsewhere / "eval7")[0] == saved[0][0], "depends on the folder or the batch size"


def results(out: Path) -> list[Any]:
    """What was scored, without what metrics.json says of the command."""
    metrics = json.loads((out / "metrics.json").read_text())
    others = [(out / f"{name}.json").read_bytes() for name in ("per_class", "detections")]
    return [{name: metrics[name] for name in METRICS}, *others]


# One after the other in one process: most of a start is the import of torch.
OTHERS = """
import runpy, sys
for program, *options in (
    ["eval", "ckpt=run", "out=scored"], ["predict", "ckpt=run", "source=shapes/*/val/*.jpg", "out=drawn"],
    ["export", "ckpt=run", "format=torch", "out=network.pt2"], ["export", "ckpt=run", "out=network.onnx"],
    ["train", "resume=run", "train.epochs=3", "devices=1", "logger.pictures=false"],
):
    sys.argv[1:] = options
    try:
        runpy.run_module(program, run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, program
"""


def test_the_other_programs_take_its_checkpoint_without_a_warning(folder: Path, trained: Finished) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-W", "error::DeprecationWarning", "-c", OTHERS],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0 and "warning" not in done.stdout.lower(), done.stdout
    for left in ("run/plots/curves.png", "scored", "drawn", "network.pt2", "network.onnx"):
        assert (folder / left).exists(), left
    assert "resumed" in done.stdout and "after epoch 2" in done.stdout
    assert "changed: train.epochs: 2 -> 3" in done.stdout
    assert [row["epoch"] for row in rows(folder / "run")] == ["1", "2", "3"]
