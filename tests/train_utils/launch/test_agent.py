"""Ranks on torch's agent: what they get, how they end, and that nothing else is printed."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from train_utils.errors import DistributedError
from train_utils.launch.agent import SIGNALS, exit_code, run_ranks

BEGIN = """
import os, signal, sys, time
from pathlib import Path
rank, folder = os.environ["RANK"], Path(sys.argv[1])
"""


@pytest.fixture(autouse=True)
def only_sigquit_is_the_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """As conf/sweeps/ranks.py has it."""
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGQUIT")


def ran(folder: Path, script: str, count: int = 2) -> int:
    return run_ranks(["-c", BEGIN + script, str(folder)], count)


def test_ranks_know_their_place_and_whose_they_are(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_MAX_RESTARTS")
    handlers = [signal.getsignal(number) for number in SIGNALS]
    assert ran(tmp_path, f"(folder / rank).write_text(' '.join(os.environ[name] for name in {names}))", 3) == 0
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {str(rank): f"3 {rank} 3 127.0.0.1 0" for rank in range(3)}
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    assert capfd.readouterr() == ("", "")


def test_a_rank_that_fails_ends_the_others_with_its_code_and_without_a_word(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ran(tmp_path, "sys.exit(2) if rank == '1' else time.sleep(60)") == 2
    with pytest.raises(DistributedError, match=r"rank 1 was ended by SIGKILL, which the kernel .* fix: look"):
        ran(tmp_path, "os.kill(os.getpid(), signal.SIGKILL) if rank == '1' else time.sleep(60)")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGINT"])
def test_a_signal_reaches_each_rank_once_and_they_end_in_their_own_time(name: str, tmp_path: Path) -> None:
    script = f"""
signal.signal(signal.{name}, lambda *_: (folder / (rank + "got")).open("a").write("x"))
(folder / rank).touch()
while not (folder / (rank + "got")).exists():
    time.sleep(0.02)
time.sleep(0.3)
"""

    def send() -> None:
        while not all((tmp_path / rank).exists() for rank in "01"):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.Signals[name])

    threading.Thread(target=send, daemon=True).start()
    assert ran(tmp_path, script) == 0
    assert [(tmp_path / f"{rank}got").read_text() for rank in "01"] == ["x", "x"]


def test_the_code_is_that_of_the_rank_that_said_why(tmp_path: Path) -> None:
    def failure(rank: int, code: int, at: int) -> ProcessFailure:
        made = ProcessFailure(rank, 1, code, str(tmp_path / "none"))
        made.timestamp = at
        return made

    assert exit_code({}) == 0
    assert exit_code({0: failure(0, -9, 1), 1: failure(1, 1, 3), 2: failure(2, 2, 2)}) == 2
    with pytest.raises(DistributedError, match=r"rank 2 was ended by SIGSEGV\. fix"):
        exit_code({0: failure(0, -15, 1), 2: failure(2, -11, 1)})
    with pytest.raises(KeyboardInterrupt):  # a second Ctrl-C, after the handlers of the first
        exit_code({0: failure(0, -2, 2), 1: failure(1, -15, 1)})
