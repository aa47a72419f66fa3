"""A multirun tells which of its jobs failed and why, wherever Hydra's launcher runs them."""

from __future__ import annotations

import csv
import importlib.metadata
import multiprocessing
import os
import pickle
import re
import signal
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from omegaconf import open_dict

from conf.programs import PROGRAMS, Program, run
from conf.schema import TrainConfig
from data import DataError
from train_utils.loop.stop_and_save import StopRequest

PLUGIN = "hydra_plugins.processes.ProcessLauncher"
LAUNCHERS = ["basic", "processes", "joblib", "submitit_local"]
PACKAGES = {"joblib": "hydra-joblib-launcher", "submitit_local": "hydra-submitit-launcher"}


class ProcessLauncher(Launcher):
    """Runs each job in a process of its own and takes its result back pickled, as joblib's and
    submitit's do.
    """

    __module__ = "hydra_plugins.processes"  # Hydra takes plugins of that package only

    def __init__(self) -> None:
        self.taken: dict[str, Any] = {}

    def setup(self, **taken: Any) -> None:
        self.taken = taken

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        setup_globals()
        return [self.in_process(number, list(job)) for number, job in enumerate(job_overrides, initial_job_idx)]

    def in_process(self, number: int, overrides: list[str]) -> JobReturn:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        child = os.fork()
        if child == 0:
            try:
                sender.send_bytes(pickle.dumps(self.job(number, overrides)))
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        sender.close()
        result = receiver.recv_bytes()
        os.waitpid(child, 0)
        returned = pickle.loads(result)
        assert isinstance(returned, JobReturn)
        return returned

    def job(self, number: int, overrides: list[str]) -> JobReturn:
        context, config = self.taken["hydra_context"], self.taken["config"]
        job = context.config_loader.load_sweep_config(config, overrides)
        with open_dict(job):
            job.hydra.job.id = job.hydra.job.num = number
        return run_job(self.taken["task_function"], job, "hydra.sweep.dir", "hydra.sweep.subdir", context)


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
        with StopRequest():  # as a training, which saves a checkpoint then
            signal.raise_signal(signal.SIGINT if config.train.seed == 0 else signal.SIGUSR1)
    return {"AP": config.optim.lr / 10, "AP50": 0.5}


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
    Plugins.instance().register(ProcessLauncher)
    package = sys.modules.get("hydra_plugins") or types.ModuleType("hydra_plugins")
    monkeypatch.setitem(sys.modules, "hydra_plugins", package)
    monkeypatch.setattr(package, "processes", sys.modules[__name__], raising=False)
    ConfigStore.instance().store("processes", {"_target_": PLUGIN}, group="hydra/launcher")

    def called(*arguments: str) -> tuple[int, str, list[str]]:
        monkeypatch.setattr(sys, "argv", ["train.py", "-m", *arguments])
        program = Program(TrainConfig, f"{__name__}:{fails_at_some_rates.__name__}")
        monkeypatch.setitem(PROGRAMS, "train", program)
        code = 0
        try:
            run("train")
        except SystemExit as end:
            code = int(end.code or 0)
        written = capfd.readouterr()
        logs = sorted(tmp_path.rglob("*_log.err")) + sorted(tmp_path.rglob("*_log.out"))  # submitit's, of each job
        everything = "".join([written.out, written.err, *(log.read_text() for log in logs)])
        return code, everything, [line for line in written.err.splitlines() if line.startswith("error: ")]

    return called


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_multirun_names_the_job_that_failed_and_ends_with_its_code(
    launcher: str, ended: Callable[..., tuple[int, str, list[str]]]
) -> None:
    if launcher in PACKAGES and not any(importlib.metadata.distributions(name=PACKAGES[launcher])):
        pytest.skip(f"{PACKAGES[launcher]} is not installed")
    by = f"hydra/launcher={launcher}"
    code, output, errors = ended(by, "optim.lr=1,2,0.5", "train.epochs=7")
    sentence = "job 1 (optim.lr=2 train.epochs=7): pictures/7.jpg is cut short. fix: replace the file"
    assert code == 2 and sentence in errors[-1] and "trains at 0.5" in output, output
    assert "Traceback" not in output
    assert re.search(r"^2 +optim.lr=0.5 +0.0500 +runs/coco/[-_0-9]+/2_lr-0.5$", output, re.M), "the table"
    if launcher in PACKAGES:  # each job takes seconds
        return

    code, output, errors = ended(by, "optim.lr=0.5,1")
    assert (code, errors) == (0, []) and "trains at 0.5" in output and "trains at 1" in output, output

    code, output, errors = ended(by, "optim.lr=0,1")
    assert code == 2 and "job 0 (optim.lr=0): optim.lr must be above 0" in errors[-1], output

    code, output, errors = ended(by, "optim.lr=1,3")
    assert code == 1 and "job 1 (optim.lr=3): KeyError: 'a bug'" in errors[-1], output
    assert "in fails_at_some_rates" in output, "no traceback of the bug"

    code, output, errors = ended(by, "optim.lr=4,1")
    assert code == 1 and "job 0 (optim.lr=4): ended with code 1" in errors[-1] and "trains at 1" in output, output


def test_all_jobs_that_failed_in_this_process_are_named_at_the_end(
    ended: Callable[..., tuple[int, str, list[str]]],
) -> None:
    code, output, errors = ended("optim.lr=1,2,0.5,0")
    assert code == 2 and len(errors) == 3, "each when it fails, and all at the end"
    assert [re.findall(r"job (\d) \(optim.lr", line) for line in errors] == [["1"], ["3"], ["1", "3"]], output


def results(tmp_path: Path) -> dict[str, list[str]]:
    """Setting, AP and folder of each job by its number, in the only multirun below ``tmp_path``."""
    (table,) = tmp_path.rglob("results.csv")
    rows = list(csv.DictReader(table.read_text().splitlines()))
    return {row["job"]: [row["setting"], row["AP"], str(Path(row["folder"]).relative_to(tmp_path))] for row in rows}


def test_each_job_has_its_own_folder_and_a_row_of_the_table(
    ended: Callable[..., tuple[int, str, list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    sweep = ("optim.lr=1,2", "train.seed=0", "logger.pictures=false", "name=x")
    code, output, _ = ended(*sweep)
    place = "runs/x/slurm-77"
    assert results(tmp_path) == {
        "0": ["optim.lr=1", "0.1", f"{place}/0_lr-1"],
        "1": ["optim.lr=2", "failed", f"{place}/1_lr-2"],
    }
    assert code == 2 and all((tmp_path / row[2] / "ran").exists() for row in results(tmp_path).values())
    assert f"job 0: optim.lr=1 -> {tmp_path}/{place}/0_lr-1\ntrains at 1" in output
    assert f"0    optim.lr=1  0.1000 *  {place}/0_lr-1\n" in output
    assert f"the best: python eval.py ckpt={place}/0_lr-1\n" in output

    # A second one in the same SLURM job is another; the same one after a requeue goes on.
    ended("optim.lr=1", "name=x")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    ended(*sweep)
    assert sorted(folder.name for folder in tmp_path.glob("runs/x/*")) == ["slurm-77", "slurm-77-2"]


def test_a_stop_in_one_job_ends_all(ended: Callable[..., tuple[int, str, list[str]]], tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    code, output, _ = ended("optim.lr=1,5,0.5")
    assert code == 130 and "stopped by Ctrl-C" in output and "trains at 0.5" not in output
    assert [row[1] for row in results(tmp_path).values()] == ["0.1", "stopped"]
    assert f"hydra.sweep.dir={next(tmp_path.glob('runs/coco/*'))} resume=auto goes on" in output
    code, output, _ = ended("optim.lr=5,0.5", "train.seed=1")
    assert code == 128 + signal.SIGUSR1 and "stopped by SIGUSR1" in output and "trains at 0.5" not in output
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    signal.signal(signal.SIGINT, before)  # the end of a program takes it away


def test_a_failed_job_ends_the_others_if_asked(ended: Callable[..., tuple[int, str, list[str]]]) -> None:
    code, output, _ = ended("optim.lr=1,2,0.5", "hydra.sweeper.max_batch_size=1")
    assert code == 2 and "trains at 1" in output and "trains at 0.5" not in output


def test_folders_that_the_program_would_ignore_are_refused(
    ended: Callable[..., tuple[int, str, list[str]]], tmp_path: Path
) -> None:
    code, _, errors = ended("hydra.run.dir=mine", "optim.lr=1,2")
    assert code == 2 and errors[0].endswith("fix: run_dir=mine")
    code, _, errors = ended("run_dir=mine", "optim.lr=1,2")
    assert code == 2 and "fix: hydra.sweep.dir=mine" in errors[0]
    assert ended("run_dir=a,b", "optim.lr=1")[0] == 0 and (tmp_path / "b" / "ran").exists()
    assert ended("hydra.sweep.dir=mine", "optim.lr=1,0.5")[0] == 0
    assert (tmp_path / "mine" / "1_lr-0.5" / "ran").exists()
