"""The script of measurements on a GPU runs on any machine, and ends a stage that hangs."""

import csv
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conf import REPOSITORY
from scripts.bench import gpu
from scripts.bench.gpu import STAGES, main
from tests.runs.process_group import python


def forked(command: list[str], stdout: Any, stderr: Any) -> Any:
    """``subprocess.Popen``, without the imports."""
    process = python(command[1:], stdout.name)
    setattr(process, "poll", lambda: process.exitcode)  # noqa: B010
    return nullcontext(process)


@pytest.mark.release
def test_every_stage_leaves_its_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(gpu, "subprocess", SimpleNamespace(Popen=forked))
    with torch.compiler.set_stance("default"):  # as before at the end
        main("1", "2", "--tiny", "--inside", f"{tmp_path}/metrics.csv")
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert {row["stage"] for row in rows} == {*STAGES}
    values = {row["measurement"]: row["value"] for row in rows}
    assert values["train.deterministic twice: the same as far as that"] == "True"
    assert values["resumed: the same to the end"] == "True" and 1 <= float(values["killed after epochs"]) < 5
    for name in ("quickstart", "finetuning"):
        assert 0 < float(values[f"{name}: first step after"]) < float(values[f"{name}: end after"])
    speeds = {row["stage"] for row in rows if row["unit"] == "images/s" and float(row["value"]) > 0}
    assert speeds == {"eager", "fused", "compiled", "training", "float16", "autotune"}


def test_a_stage_that_hangs_is_ended_and_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "CALL_SECONDS", 0)
    main("2", "--tiny", f"{tmp_path}/metrics.csv")
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [row["stage"] for row in rows] == [name for name, (call, *_) in STAGES.items() if call == 2]
    assert all(row["measurement"] == "FAILED" and "killed" in row["value"] for row in rows)
