"""Which folder a run gets or finds again, if a launcher starts several per job or restarts one."""

import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from conf import TrainError
from conf.cli.from_checkpoint import complete_training
from conf.compose import compose
from conf.schema import TrainConfig
from train_utils.distributed import World, init_distributed_mode
from train_utils.report.run_report import save_config
from train_utils.run_folder import reserve_run_folder

OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM", "TORCHELASTIC")


def srun(job: str, step: int, restarts: int = 0) -> dict[str, str]:
    return batch(job, restarts) | {"SLURM_STEP_ID": str(step), "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


def batch(job: str, restarts: int = 0) -> dict[str, str]:
    return {"SLURM_JOB_ID": job, "SLURM_NTASKS": "1"} | ({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {})


def torchrun(run: str, restarts: int = 0) -> dict[str, str]:
    return {"TORCHELASTIC_RUN_ID": run, "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": str(restarts)}


def lock_for(folder: Path, pid: int, host: str | None = None, job: str | None = None) -> None:
    lock = {"host": host or platform.node(), "pid": pid, "job": job}
    (folder / ".lock").write_text(json.dumps(lock))


@dataclass
class Job:
    """A working folder and its trainings; each process is an environment."""

    folder: Path
    world: World
    patch: pytest.MonkeyPatch
    open: dict[Path, ExitStack] = field(default_factory=dict)

    def start(
        self, environment: Mapping[str, str], *options: str, checkpoint: bool = True, ends: bool = False
    ) -> tuple[str, bool]:
        """Start a training; return its folder's name and whether it resumes from a checkpoint."""
        with self.patch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            config = compose("train", TrainConfig, ["experiment=quickstart", "name=n", *options], complete_training)
            stack = ExitStack()
            folder = stack.enter_context(reserve_run_folder(self.world, config))()
        save_config(folder, config)
        goes_on = config.resume is not None and any((folder / "checkpoints").glob("*.pt"))
        if checkpoint:
            (folder / "checkpoints" / "last.pt").touch()
        if ends:
            stack.close()
        else:
            self.open[folder] = stack
        return folder.name, goes_on

    def others(self) -> None:
        """Let other processes of this machine hold the folders in use."""
        for folder in self.open:
            lock_for(folder, os.getppid())

    def kill(self) -> None:
        """Kill all trainings as by kill -9: their locks name a process that is over."""
        process = subprocess.Popen(["true"])
        process.wait()
        folders = list(self.open)
        self.end()
        for folder in folders:
            lock_for(folder, process.pid)

    def end(self) -> None:
        for stack in self.open.values():
            stack.close()
        self.open.clear()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(OWN)]:
        monkeypatch.delenv(name)
    found = Job(tmp_path, init_distributed_mode("cpu", 60), monkeypatch)
    yield found
    found.end()


A, B = "optim.lr=0.1", "optim.lr=0.2"
Launch = Callable[..., dict[str, str]]


@pytest.mark.parametrize("within", ["the job's shell", "torchrun"])
def test_trainings_one_after_the_other_go_on_where_the_job_was_killed(within: str, job: Job) -> None:
    base = "slurm-41"

    def launch(name: str, restarts: int = 0) -> dict[str, str]:
        return batch(name, restarts) | (torchrun(f"random{restarts}") if within == "torchrun" else {})

    assert job.start(launch("41"), A, ends=True) == (base, False)
    assert job.start(launch("41"), B, checkpoint=False) == (f"{base}-2", False)
    job.kill()
    assert job.start(launch("41", restarts=1), A, ends=True) == (base, True)
    assert job.start(launch("41", restarts=1), B) == (f"{base}-2", False), "begins again where it was"
    job.kill()
    assert job.start(launch("41", restarts=2), B, ends=True) == (f"{base}-2", True)
    assert job.start(launch("41", restarts=2), "optim.lr=0.3", ends=True) == (f"{base}-3", False)


def test_a_job_goes_on_only_where_it_was_requeued_or_asked_to(job: Job) -> None:
    assert job.start(srun("41", 0), A, ends=True) == ("slurm-41", False)
    assert job.start(srun("41", 1), A, ends=True) == ("slurm-41-2", False)
    assert job.start(srun("41", 2), A, "resume=auto", ends=True) == ("slurm-41", True)
    assert job.start(srun("41", 3), B, "resume=auto", ends=True) == ("slurm-41-3", False)
    assert job.start(srun("41", 0, restarts=1), A, "resume=null", ends=True) == ("slurm-41-4", False)
    machine = ("data.workers=1", "data.root=/elsewhere", "train.timeout_seconds=9", "device=cpu")
    assert job.start(srun("41", 0, restarts=1), B, *machine, ends=True) == ("slurm-41-3", True)
    for other in ("model.weights=a.weights", "evaluate.nms_iou=0.5", "train.seed=1", "train.batch_size=32"):
        assert job.start(srun("41", 0, restarts=1), B, other, ends=True)[1] is False, other


@pytest.mark.parametrize(("launch", "base"), [(torchrun, "torchrun-id"), (batch, "slurm-id")])
def test_a_restart_takes_over_from_another_machine_and_nobody_else_does(launch: Launch, base: str, job: Job) -> None:
    """Torchrun's count of restarts may still be 0 on the machine that rank 0 moved to."""
    assert job.start(launch("id"), A) == (base, False)
    (lock,) = job.folder.rglob(".lock")
    assert json.loads(lock.read_text()) == {"host": platform.node(), "pid": os.getpid(), "job": base}
    job.end()
    lock_for(lock.parent, 1, "elsewhere", base)
    with pytest.raises(TrainError, match=rf"in use by process 1 on host elsewhere\. .*; if it is gone, remove {lock}"):
        job.start({}, f"resume={lock.parent}", A)
    assert job.start(launch("id", restarts=int(launch is batch)), A) == (base, True)
    job.end()
    assert job.start(launch("id", restarts=1), B) == (f"{base}-2", False), "another setting"


def test_a_lock_cut_by_a_crash_is_free(job: Job) -> None:
    name, _ = job.start({}, A, ends=True)
    (job.folder / "runs" / "n" / name / ".lock").write_text('{"host": "a')
    assert job.start({}, f"resume=runs/n/{name}", A) == (name, True)


def test_a_lock_holds_against_a_process_with_the_same_number(job: Job) -> None:
    """As in containers that share the host's name, or of two trainings in threads."""
    name, _ = job.start({}, A)
    with pytest.raises(TrainError, match=f"in use by process {os.getpid()}"):
        job.start({}, f"resume=runs/n/{name}", A)


def test_without_a_job_every_run_has_a_folder_and_none_is_opened_twice(job: Job) -> None:
    job.patch.setattr("conf.cli.launch.VARIED", ["optim.lr-0.0123456789"] * 20)  # longer than a name may be
    assert len({job.start({}, A)[0] for _ in range(3)}) == 3
    job.start({}, "run_dir=here")
    job.others()
    for options in (["run_dir=here"], ["resume=here"], ["resume=auto", "run_dir=here"]):
        with pytest.raises(TrainError, match=r"here is in use by process \d+ on host .*\. fix: wait for"):
            job.start({}, *options)
    job.end()
    with pytest.raises(TrainError, match=r"here already holds a run\. fix: resume="):
        job.start({}, "run_dir=here")
    for options in (["resume=here"], ["resume=auto", "run_dir=here"]):
        assert job.start({}, *options, ends=True)[1]
    (job.folder / "here" / "checkpoints" / "last.pt").unlink()
    assert not job.start({}, "resume=here")[1], "there is no checkpoint: it begins again"


def test_resume_auto_means_the_newest_run_with_a_checkpoint(job: Job) -> None:
    first, _ = job.start({}, A, ends=True)
    job.start({}, A, checkpoint=False, ends=True)
    assert job.start({}, "resume=auto", A) == (first, True)
    job.others()
    with pytest.raises(TrainError, match=f"{first} is in use by"):
        job.start({}, "resume=auto", A)
