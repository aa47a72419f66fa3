"""Ranks that fail, hang, are killed or never meet: one sentence, and every process ends soon.

test_slurm.py has the first under srun. ``python test_failing_rank.py <event>`` is a rank.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs.kill_resume import OPTIONS
from tests.runs.process_group import fork_context, free_port
from tests.train_utils.test_distributed import by_hand, clean_environment

TIMEOUT = 8
MORE = ("train.epochs=1", "evaluate.every=1", "evaluate.batch_size=1", f"train.timeout_seconds={TIMEOUT}")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__)


def run_rank(event: str) -> None:
    """Run ``train.py`` as a user does; what ``event`` names happens to rank 1."""
    from conf.programs import run
    from models import Darknet, ModelError
    from train_utils.launch import read_launch

    forward, calls = Darknet.forward, []

    def failing(self: Darknet, images: torch.Tensor) -> Any:
        calls.append(self.training)
        if calls[-2:] == ([False] * 2 if event == "killed in an evaluation" else [True] * 2):
            Path("event").touch()
            if event == "fails":
                raise ModelError("the second pass fails. fix: nothing")
            os.kill(os.getpid(), signal.SIGSTOP if event == "stops in an epoch" else signal.SIGKILL)
        return forward(self, images)

    if event == "launcher killed":
        import train  # noqa: F401 - takes seconds

        launcher = os.getppid()
        Path(f"ready{read_launch().rank}").touch()
        while os.getppid() == launcher:
            time.sleep(0.05)
    elif "comes" in event:
        Path("event").touch()
    elif read_launch().rank == 1:
        setattr(Darknet, "forward", failing)  # noqa: B010
    sys.argv[1:] = [*OPTIONS, *MORE]
    try:
        run("train")
    except SystemExit as end:
        Path(f"code{read_launch().rank}").write_text(str(end.code))
        raise


def run_by_hand(folder: Path, event: str, environment: dict[str, str]) -> None:
    """Run a rank in a process forked with everything imported, with its output in a file."""
    os.chdir(folder)
    with open("output", "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(clean_environment() | environment)
    torch.set_num_threads(1)
    run_rank(event)


def processes_in(folder: Path) -> list[int]:
    """The processes that work in ``folder``: ranks and what they started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (entry / "cwd").readlink() == folder:
                found.append(int(entry.name))
    return found


@contextmanager
def no_process_left(folder: Path) -> Iterator[None]:
    """At the end no process works in ``folder``, and none after an error either."""
    try:
        yield
        until = time.monotonic() + 10  # loader processes look for their rank every 5 s
        while processes_in(folder) and time.monotonic() < until:
            time.sleep(0.1)
        assert not processes_in(folder)
    finally:
        for process in processes_in(folder):
            os.kill(process, signal.SIGKILL)


def wait_for(*paths: Path) -> None:
    until = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until, paths
        time.sleep(0.05)


def errors_in(output: str) -> list[str]:
    return re.findall(r"error: .*? fix: ", output)  # anywhere in a line: another rank may have written half of one


@pytest.mark.slow
def test_a_rank_that_fails_says_it_once_and_ends_all(tmp_path: Path) -> None:
    with no_process_left(tmp_path):
        done = subprocess.run(
            [*TORCHRUN, "fails"], cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=240
        )
        seconds = time.time() - (tmp_path / "event").stat().st_mtime
    assert errors_in(done.stderr) == ["error: the second pass fails. fix: "]
    assert re.search(r"exitcode *: 2\b", done.stderr) and done.returncode != 0, done.stderr
    assert seconds < 30, f"all ended {seconds:.0f} s after the error"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_launcher_killed_before_the_ranks_meet(tmp_path: Path) -> None:
    with no_process_left(tmp_path), (tmp_path / "output").open("w") as output:
        launcher = subprocess.Popen(
            [*TORCHRUN, "launcher killed"], cwd=tmp_path, env=clean_environment(), stdout=output, stderr=output
        )
        wait_for(tmp_path / "ready0", tmp_path / "ready1")
        launcher.kill()
        launcher.wait()
        killed = time.time()
        wait_for(tmp_path / "code0", tmp_path / "code1")
        assert time.time() - killed < 2 * TIMEOUT
    assert [(tmp_path / f"code{rank}").read_text() for rank in range(2)] == ["2", "2"]
    printed = (tmp_path / "output").read_text()
    assert len(errors_in(printed)) == 1 and "did not meet its peers (" in printed and len(printed) < 600, printed


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_ranks_without_a_launcher_end_by_themselves(tmp_path: Path) -> None:
    """All at once, since they mostly wait."""
    cases: dict[str, tuple[tuple[int, ...], str]] = {
        "rank 1 never comes": ((0,), "rank 0 did not meet its peers ("),
        "rank 0 never comes": ((1,), "rank 1 did not meet its peers ("),
        "stops in an epoch": ((0, 1), "lost another rank ("),
        "killed in an evaluation": ((0, 1), "lost another rank ("),
    }
    with no_process_left(tmp_path):
        ranks = {}
        for event, (numbers, _) in cases.items():
            (folder := tmp_path / event).mkdir()
            port = free_port()
            ranks[event] = [
                fork_context().Process(target=run_by_hand, args=(folder, event, by_hand(rank, 2, port)))
                for rank in numbers
            ]
            for process in ranks[event]:
                process.start()
        for event, (numbers, sentence) in cases.items():
            folder = tmp_path / event
            with no_process_left(folder):
                wait_for(folder / f"code{numbers[0]}")
                seconds = (folder / f"code{numbers[0]}").stat().st_mtime - (folder / "event").stat().st_mtime
                assert seconds < 2 * TIMEOUT, event
                ranks[event][0].join(10)
                assert ranks[event][0].exitcode == 2, event
                ranks[event][-1].kill()  # the stopped one
                printed = (folder / "output").read_text()
                assert len(errors_in(printed)) == 1 and f"error: {sentence}" in printed, printed


if __name__ == "__main__":
    run_rank(sys.argv[1])
