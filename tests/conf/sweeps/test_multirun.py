"""A multirun tells which of its jobs failed and why, wherever Hydra's launcher runs them."""

from __future__ import annotations

import csv
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from joblib.externals.loky import get_reusable_executor

from conf.programs import PROGRAMS, run
from conf.schema import EvalConfig, TrainConfig
from data.errors import DataError

LAUNCHERS = ["basic", "joblib", "submitit_local"]


def fails_at_some_rates(config: TrainConfig) -> dict[str, float]:
    """A program whose jobs fail in every way; a rate of 0 is refused before it."""
    print(f"trains at {config.optim.lr}", flush=True)
    if config.run_dir is not None:
        Path(config.run_dir).mkdir(exist_ok=True)
        Path(config.run_dir, "ran").touch()
    if config.optim.lr == 2:
        raise DataError("pictures/7.jpg is cut short. fix: replace the file")
    if config.optim.lr == 3:
        raise KeyError("a bug")
    if config.optim.lr == 4:
        sys.exit(1)
    if config.optim.lr == 5:
        from train_utils.loop.stop_and_save import StopRequest  # imports torch, which other jobs do without

        with StopRequest():  # as a training, which saves a checkpoint then
            signal.raise_signal(signal.SIGINT if config.train.seed == 0 else signal.SIGUSR1)
    if config.optim.lr >= 6:
        wait_for_the_others(Path(f"{config.name}-{config.optim.lr:g}"), int(str(config.name)[0]))
    return {"AP": config.optim.lr / 10, "AP50": 0.5}


def wait_for_the_others(file: Path, jobs: int) -> None:
    """Leave the GPUs of this job in ``file``, and wait until ``jobs`` jobs have, too."""
    file.write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    for _ in range(200):
        if len(list(Path.cwd().glob(f"{file.name.split('-')[0]}-*"))) >= jobs:
            return
        time.sleep(0.05)
    raise TimeoutError(f"fewer than {jobs} jobs run side by side")


def scores(config: EvalConfig) -> dict[str, float]:
    """A program in place of eval.py."""
    Path(str(config.out)).mkdir(exist_ok=True)
    return {"AP": config.evaluate.batch_size / 16}


@pytest.fixture
def ended(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, str, list[str]]]:
    """Exit code, output and lines of errors of a multirun of ``fails_at_some_rates``."""
    monkeypatch.chdir(tmp_path)
    tests = Path(__file__).parents[1]
    # Processes that are started anew import this module, by the name that pytest gives it.
    paths = [str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    for name, function in (("train", fails_at_some_rates), ("eval", scores)):
        program = PROGRAMS[name]._replace(function=f"{__name__}:{function.__name__}", complete=None)
        monkeypatch.setitem(PROGRAMS, name, program)

    def called(*arguments: str, program: str = "train") -> tuple[int, str, list[str]]:
        monkeypatch.setattr(sys, "argv", [f"{program}.py", "-m", *arguments])
        code = 0
        try:
            run(program)
        except SystemExit as end:
            code = int(end.code or 0)
        get_reusable_executor().shutdown(wait=True)  # joblib would take its processes again, with their GPUs
        written = capfd.readouterr()
        logs = sorted(tmp_path.rglob("*_log.err")) + sorted(tmp_path.rglob("*_log.out"))  # submitit's, of each job
        everything = "".join([written.out, written.err, *(log.read_text() for log in logs)])
        return code, everything, [line for line in written.err.splitlines() if line.startswith("error: ")]

    return called


def test_jobs_of_joblib_side_by_side_have_gpus_of_their_own(
    ended: Callable[..., tuple[int, str, list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,GPU-8f")  # as many jobs side by side by default
    code, output, _ = ended("hydra/launcher=joblib", "optim.lr=6,7,8", "name='3'")
    assert code == 0, output
    assert sorted(file.read_text() for file in tmp_path.glob("3-*")) == ["5", "7", "GPU-8f"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5,7,GPU-8f"

    code, output, _ = ended("hydra/launcher=joblib", "hydra.launcher.n_jobs=4", "optim.lr=6,7,8,9", "name=3more")
    assert code == 2 and "3 GPUs are too few for the jobs side by side. fix: hydra.launcher.n_jobs=3" in output
    assert sorted(file.read_text() for file in tmp_path.glob("3more-*")) == ["5", "7", "GPU-8f"]

    ended("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "optim.lr=6,7", "name='2'", "train.device=cpu")
    assert [file.read_text() for file in tmp_path.glob("2-*")] == ["5,7,GPU-8f"] * 2


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_multirun_names_the_job_that_failed_and_ends_with_its_code(
    launcher: str, ended: Callable[..., tuple[int, str, list[str]]]
) -> None:
    code, output, errors = ended(f"hydra/launcher={launcher}", "optim.lr=2,0.5", "train.epochs=7")
    sentence = "job 1 (optim.lr=2 train.epochs=7): pictures/7.jpg is cut short. fix: replace the file"
    assert code == 2 and sentence in errors[-1] and "trains at 0.5" in output, output
    assert "Traceback" not in output and "job 2 of 2: optim.lr=0.5 -> runs/coco/" in output
    assert re.search(r"^2 +optim.lr=0.5 +0.0500 \* +runs/coco/[-_0-9]+/2_optim.lr-0.5$", output, re.M), "the table"


def test_every_failure_has_its_sentence_and_code(ended: Callable[..., tuple[int, str, list[str]]]) -> None:
    code, output, errors = ended("optim.lr=2,0.5,0")
    assert code == 2 and len(errors) == 3, "each when it fails, and all at the end"
    assert [re.findall(r"job (\d) \(optim.lr", line) for line in errors] == [["1"], ["3"], ["1", "3"]], output
    assert "job 3 (optim.lr=0): optim.lr must be above 0" in errors[-1]

    code, output, errors = ended("data=bccd,shapes", "optim.lr=0.5")
    assert code == 0 and "data=bccd -> runs/bccd-shapes/" in output, output
    assert "data=shapes -> runs/mine/" in ended("data=bccd,shapes", "name=mine", "optim.lr=0.5")[1]

    code, output, errors = ended("optim.lr=3,4")
    assert code == 1 and "job 1 (optim.lr=3): KeyError: 'a bug'" in errors[-1], output
    assert "in fails_at_some_rates" in output, "no traceback of the bug"
    assert "job 2 (optim.lr=4): ended with code 1" in errors[-1]


def results(tmp_path: Path) -> dict[str, list[str]]:
    """Setting, AP and folder of each job by its number, in the only multirun below ``tmp_path``."""
    (table,) = tmp_path.rglob("results.csv")
    return {row["job"]: [row["setting"], row["AP"], row["folder"]] for row in csv.DictReader(table.open())}


def test_each_job_has_its_own_folder_and_a_row_of_the_table(
    ended: Callable[..., tuple[int, str, list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    sweep = ("optim.lr=1,2", "train.seed=0", "logger.pictures=false", "name=x")
    code, output, _ = ended(*sweep)
    place = "runs/x/slurm-77"
    assert results(tmp_path) == {
        "1": ["optim.lr=1", "0.1", f"{place}/1_optim.lr-1"],
        "2": ["optim.lr=2", "failed", f"{place}/2_optim.lr-2"],
    }
    assert code == 2 and all(Path(row[2], "ran").exists() for row in results(tmp_path).values())
    assert f"job 1 of 2: optim.lr=1 -> {place}/1_optim.lr-1\ntrains at 1" in output
    assert f"1    optim.lr=1  0.1000 *  {place}/1_optim.lr-1\n" in output

    # A second one in the same SLURM job is another; the same one after a requeue goes on.
    ended("optim.lr=1", "name=x")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    ended(*sweep)
    assert sorted(folder.name for folder in tmp_path.glob("runs/x/*")) == ["slurm-77", "slurm-77-2"]


def test_a_sweep_of_the_cfgs_anchors_and_fitted_ones(
    ended: Callable[..., tuple[int, str, list[str]]], tmp_path: Path
) -> None:
    assert ended("model=yolov3-tiny", "model.anchors=null,auto")[0] == 0
    assert [row[0] for row in results(tmp_path).values()] == ["model.anchors=null", "model.anchors=auto"]


def test_evaluations_have_folders_and_a_table_too(
    ended: Callable[..., tuple[int, str, list[str]]], tmp_path: Path
) -> None:
    given = ("model=yolov3-tiny", "data=shapes", "evaluate.batch_size=4,8", "hydra.sweep.dir=mine")
    code, output, _ = ended(*given, program="eval")
    assert code == 0 and "job 2 of 2: evaluate.batch_size=8 -> mine/2_" in output
    rows = results(tmp_path).values()
    assert [row[1] for row in rows] == ["0.25", "0.5"] and all(Path(row[2]).is_dir() for row in rows)
    code, _, errors = ended("ckpt=a,b", "out=there", program="eval")
    assert code == 2 and errors[0].startswith("error: out=there is one folder")


def test_a_stop_in_one_job_ends_all(ended: Callable[..., tuple[int, str, list[str]]], tmp_path: Path) -> None:
    code, output, _ = ended("optim.lr=1,5,0.5")
    assert code == 130 and "stopped by Ctrl-C" in output and "trains at 0.5" not in output
    assert [row[1] for row in results(tmp_path).values()] == ["0.1", "stopped"]
    code, output, _ = ended("optim.lr=5,0.5", "train.seed=1")
    assert code == 128 + signal.SIGUSR1 and "stopped by SIGUSR1" in output and "trains at 0.5" not in output


def test_a_failed_job_ends_the_others_if_asked(ended: Callable[..., tuple[int, str, list[str]]]) -> None:
    code, output, _ = ended("optim.lr=2,0.5", "hydra.sweeper.max_batch_size=1")
    assert code == 2 and "trains at 2" in output and "trains at 0.5" not in output


def test_folders_that_the_program_would_ignore_are_refused(
    ended: Callable[..., tuple[int, str, list[str]]], tmp_path: Path
) -> None:
    code, _, errors = ended("hydra.run.dir=mine", "optim.lr=1,2")
    assert code == 2 and errors[0].endswith("fix: run_dir=mine")
    code, _, errors = ended("run_dir=mine", "optim.lr=1,2")
    assert code == 2 and "fix: hydra.sweep.dir=mine" in errors[0]
    assert ended("run_dir=a,b", "hydra.sweep.dir=mine")[0] == 0 and (tmp_path / "b" / "ran").exists()
    assert ended("hydra.sweep.dir=mine", "optim.lr=1")[0] == 0
    assert (tmp_path / "mine" / "1_" / "ran").exists() or list(tmp_path.glob("mine/*"))
