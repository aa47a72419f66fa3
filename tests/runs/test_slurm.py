"""The sbatch scripts on a real SLURM of two nodes; skipped without one."""

import os
import re
from pathlib import Path

import pytest
import yaml

from data import ShapesConfig, ensure_shapes
from tests.runs.kill_resume import differing_parts
from tests.runs.slurm_jobs import Job, answer, slurm_is_up, submit
from train_utils.checkpoint import load_last

SHAPES = ShapesConfig(train_images=384, val_images=6, image_size=64)
STEPS = 96  # of two epochs: signals take a second or two to arrive
TWO_BY_TWO = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2"]  # the nodes' GPUs are stand-ins
ONE = ["--nodes=1", "--gpus-per-node=0"]

LONG = pytest.mark.skipif("ALL_SLURM_TESTS" not in os.environ, reason="a minute or two: ALL_SLURM_TESTS=1")

pytestmark = [
    pytest.mark.release,
    pytest.mark.slurm,
    pytest.mark.skipif(not slurm_is_up(), reason="no SLURM with two nodes"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("with space") / "a b"
    ensure_shapes(path / "shapes", SHAPES)
    return path


def options(folder: Path, *more: str) -> list[str]:
    shapes = f"{{train_images: {SHAPES.train_images}, val_images: {SHAPES.val_images}, image_size: 64}}"
    return [
        "data=shapes", f"data.root='{folder}/shapes'", f"data.shapes={shapes}", "data.workers=1",
        "data.index_dir=index", "model=yolov3-tiny", "model.width=0.125", "train.image_size=64", "evaluate.every=0",
        "train.multi_scale=[0.5, 1.5]", "train.batch_size=8", "train.epochs=2", "device=cpu",
        "logger.pictures=false", "logger.every_steps=5", *more,
    ]  # fmt: skip


def run_of(job: Job) -> Path:
    return job.folder / "runs" / "shapes" / f"slurm-{job.number}"


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """The run of an undisturbed job: one torchrun per node, with two processes each."""
    job = submit("train.sbatch", folder, TWO_BY_TWO, options(folder))
    assert job.end() == "COMPLETED", job.output
    assert job.output.count("4 ranks x 2 images x 1 pass)") == 1, "the processes did not form one run"
    assert job.fact("Restarts") == "0" and re.search(r"^ *2/2 ", job.output, re.M)
    return run_of(job)


def test_a_job_trains_on_two_nodes(whole: Path) -> None:
    assert load_last(whole)[0]["world_size"] == 4 and (whole / "train.log").is_file()


@LONG
@pytest.mark.parametrize("by", ["SIGUSR1", "SIGTERM"])
def test_a_job_that_is_stopped_in_mid_epoch_is_requeued_and_ends_with_the_same_weights(by, folder, whole) -> None:
    """By USR1 before the time limit, with a task for each rank; and preempted, with torchrun.

    torchrun also receives SIGTERM, and exits with code 1.
    """
    if by == "SIGUSR1":
        job = submit("train_srun.sbatch", folder, TWO_BY_TWO, options(folder))
        job.wait_for_steps()
        answer("scancel", "--batch", "--signal=USR1", job.number)  # as --signal=B:USR1@120 does
    else:
        job = submit("train.sbatch", folder, [*TWO_BY_TWO, "--partition=preempt"], options(folder))
        job.wait_for_steps()
        answer("sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    job.restart_now()
    assert job.end() == "COMPLETED" and job.fact("Restarts") == "1", job.output
    stops = re.findall(r"^stopped at step (\d+) by (\w+)", job.output, re.MULTILINE)
    assert len(stops) == 1 and stops[0][1] == by and int(stops[0][0]) % (STEPS // 2) != 0, stops
    assert job.output.count("is requeued") == 1 and "killed by signal" not in job.output
    assert differing_parts(whole, run_of(job)) == []
    assert not list((job.folder / "runs").glob(".requeue*"))


@LONG
def test_an_array_trains_each_line_and_requeues_only_the_task_that_was_stopped(folder: Path) -> None:
    sweep = folder / "sweep.txt"
    sweep.write_text(
        "# one line for each task\noptim.lr=0.001\n\noptim.lr=0.002 train.multi_scale='[1.0, 1.0]'\n"
        "optim.lr=0.003 train.epochs=2 \"name='$(date) x'\"\n"
    )
    array = submit(
        "array.sbatch",
        folder,
        [*ONE, "--array=0-2", f"--output={folder}/job-%A_%a.out"],
        ["sweep.txt", "--", *options(folder, "train.epochs=1")],
    )
    tasks = [Job(f"{array.number}_{task}", folder) for task in range(3)]
    tasks[2].wait_for_steps()
    answer("scancel", "--batch", "--signal=USR1", tasks[2].number)
    tasks[2].restart_now()
    assert [task.end() for task in tasks] == ["COMPLETED"] * 3, [task.output for task in tasks]
    assert [task.fact("Restarts") for task in tasks] == ["0", "0", "1"]
    names = ["shapes", "shapes", "$(date) x"]
    runs = [folder / "runs" / name / f"slurm-{task.number}" for name, task in zip(names, tasks, strict=True)]
    configs = [yaml.safe_load((run / "config.yaml").read_text()) for run in runs]
    assert [config["optim"]["lr"] for config in configs] == [0.001, 0.002, 0.003]
    assert [config["train"]["multi_scale"] for config in configs] == [[0.5, 1.5], [1.0, 1.0], [0.5, 1.5]]
    assert [load_last(run)[0]["epoch"] for run in runs] == [1, 1, 2]
