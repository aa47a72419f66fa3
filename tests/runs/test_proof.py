"""A run of two processes that was killed, resumed and ended by one: its proof holds on 1 and 2."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from conf.entry import compose
from conf.schema_tools import VerifyConfig
from scripts.verify import verify
from tests.runs.kill_resume import PATIENCE, finish, start, start_and_wait
from tests.runs.process_group import run_group
from train_utils.report.proof import read_proof

MORE = ("train.deterministic=true", "train.epochs=3")


def verify_run(run: Path) -> None:
    verify(compose("verify", VerifyConfig, [f"run={run}"]))


@pytest.mark.slow
def test_killed_resumed_and_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    processes = start_and_wait(run, 2, *MORE)
    until = time.monotonic() + PATIENCE
    while not (run / "checkpoints" / "last.pt").exists() and time.monotonic() < until:
        time.sleep(0.005)
    os.kill(processes[1].pid, signal.SIGKILL)
    finish(processes, 1)
    assert finish(start(run, 1, *MORE), PATIENCE), Path(f"{run}.txt").read_text()[-3000:]
    proof = read_proof(run)
    assert [entry["processes"] for entry in proof["starts"]] == [2, 1]
    assert any("with other processes (2 -> 1)" in sentence for sentence in proof["weaknesses"])
    verify_run(run)
    said = capsys.readouterr().out
    assert said.endswith("nothing differs\n") and "not checked" not in said
    run_group(verify_run, 2, run)
