"""Ranks that fail, hang, are killed or never meet: one sentence, and every process ends soon.

``python test_failing_rank.py <event>`` is a rank.
"""

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs.kill_resume import OPTIONS
from tests.runs.process_group import (
    clean_environment,
    finish_python,
    fork_context,
    free_port,
    no_process_left,
    python,
    take_place,
    write_to,
)

MORE = ("train.epochs=1", "evaluate.every=1", "evaluate.batch_size=1", "train.timeout_seconds=8")


def run_rank(event: str, *more: str) -> None:
    """Run ``train.py`` as a user does; what ``event`` names happens to rank 1."""
    from conf.cli.launch import read_launch
    from conf.cli.program import start
    from models import Darknet, ModelError

    forward, calls = Darknet.forward, []

    def failing(self: Darknet, images: torch.Tensor) -> Any:
        calls.append(self.training)
        if calls[-2:] == ([False] * 2 if event == "killed in an evaluation" else [True] * 2):
            if event == "fails":
                raise ModelError("the second pass fails", "nothing")
            os.kill(os.getpid(), signal.SIGSTOP if event == "stops in an epoch" else signal.SIGKILL)
        return forward(self, images)

    sys.argv[1:] = [*OPTIONS, *MORE, *more]
    if event.startswith("asks for a GPU"):
        sys.argv.append(f"device={'cuda' if str(read_launch().rank) in event else 'cpu'}")
    elif event == "is orphaned":
        sys.argv += ["train.epochs=300", "evaluate.every=0", "run_dir=run"]
    elif read_launch().rank == 1:
        setattr(Darknet, "forward", failing)  # noqa: B010
    try:
        start("train")
    except SystemExit as end:
        Path(f"exit {end.code} of {read_launch().rank}").touch()
        raise


def run_by_hand(folder: Path, event: str, rank: int, port: int) -> None:
    """Run a rank in a process forked with everything imported, with its output in a file."""
    os.chdir(folder)
    write_to("output")
    take_place(rank, 2, port)
    run_rank(event)


def wait_for(*paths: Path) -> None:
    until = time.monotonic() + 240
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until, paths
        time.sleep(0.05)


def errors_in(output: str) -> list[str]:
    return re.findall(r"error: .*?\nfix: ", output)  # anywhere in a line: another rank may have written half of one


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
LAUNCH = ["-m", "torch.distributed.launch", "--use-env", "--nproc-per-node=3"]
CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="rank 1 finds a GPU here")
BEFORE = pytest.param("asks for a GPU 0 1", "a CUDA device was asked for, .*", LAUNCH, marks=CUDA)  # there is a group


@pytest.mark.release
@pytest.mark.parametrize(("event", "sentence", "launcher"), [("fails", r"the second pass fails\.", TORCHRUN), BEFORE])
def test_a_rank_that_fails_says_it_once_and_ends_all(tmp_path, event, sentence, launcher) -> None:
    command = [*launcher, __file__, event]
    with no_process_left(tmp_path):
        code, printed = finish_python(command, tmp_path, clean_environment())
    (said,) = errors_in(printed)
    assert re.fullmatch(f"error: {sentence}\nfix: ", said), said
    assert re.search(r"exitcode *: 2\b", printed) and code != 0, printed
    assert "exitcode  : -9" not in printed, "a rank ignored SIGTERM"


@pytest.mark.release
@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process that its parent has ended")
def test_ranks_end_with_their_torchrun_and_keep_their_steps(tmp_path: Path) -> None:
    with no_process_left(tmp_path):
        output = f"{tmp_path}/output"
        torchrun = python([*TORCHRUN, __file__, "is orphaned"], output, str(tmp_path), clean_environment())
        wait_for(tmp_path / "run" / "checkpoints" / "last.pt")
        torchrun.kill()
        torchrun.join()
    assert "stopped at step" in (tmp_path / "run" / "train.log").read_text()


@pytest.mark.release
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_ranks_without_a_launcher_end_by_themselves(tmp_path: Path) -> None:
    cases: dict[str, tuple[list[int], str]] = {  # the ranks that have to end, and what one of them says
        "rank 1 never comes": ([0], "rank 0 did not meet its peers ("),
        "rank 0 never comes": ([1], "rank 1 did not meet its peers ("),
        "stops in an epoch": ([0], "lost another rank ("),
        "killed in an evaluation": ([0], "lost another rank ("),
    }
    folders = {event: tmp_path / event for event in cases}
    for folder in folders.values():
        folder.mkdir()
    with no_process_left(tmp_path):
        started = []
        for event, folder in folders.items():
            port = free_port()
            for rank in cases[event][0] if "comes" in event else (0, 1):
                started.append(fork_context().Process(target=run_by_hand, args=(folder, event, rank, port)))
                started[-1].start()
        for event, (ranks, sentence) in cases.items():
            wait_for(*(folders[event] / f"exit 2 of {rank}" for rank in ranks))
            printed = (folders[event] / "output").read_text()
            assert len(errors_in(printed)) == 1 and f"error: {sentence}" in printed, printed
            assert sentence[:4] == "lost" or len(printed) < 600, f"torch printed its stack: {printed}"
        for process in started:
            process.kill()  # the stopped one
            process.join()


if __name__ == "__main__":
    run_rank(*sys.argv[1:])
