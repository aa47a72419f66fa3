"""The check of a cluster, on gloo's ranks: all pass, and it sees what is not exact."""

import json
from pathlib import Path

import pytest
import torch

from conf import REPOSITORY, ConfigError, TrainError
from conf.cli.launch import environment_of_one
from scripts.conformance import Conformance, largest_difference, main
from tests.runs.process_group import finish_python

CHECKS = 6


def passed(printed: str) -> list[str]:
    rows = [line for line in printed.splitlines() if line.startswith(("pass", "FAIL"))]
    assert len(rows) == CHECKS and all(row.startswith("pass") for row in rows), printed
    return rows


@pytest.mark.release
def test_ranks_of_torchrun_are_certified_and_end_when_one_is_killed(tmp_path: Path) -> None:
    environment = environment_of_one() | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node=2 -m scripts.conformance kill out=report.json"
    code, printed = finish_python(torchrun.split(), tmp_path, environment)
    rows = passed(printed)
    assert code != 0, printed
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["passed"], report["ranks"], report["nodes"], report["launcher"]) == (True, 2, 1, "torchrun")
    assert [one["check"] in row for one, row in zip(report["checks"], rows, strict=True)] == [True] * CHECKS
    assert any(version.startswith("torch ") for version in report["versions"]) and str(tmp_path) not in str(report)


def test_what_breaks_is_in_the_certificate_and_no_other_file_is_overwritten(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Conformance, "weights", lambda self: self.record("weights", False, "differ by 1"))
    monkeypatch.setattr("scripts.conformance.evaluate", lambda options: 1 // 0)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ZeroDivisionError):
        main("out=report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert [one["passed"] for one in report["checks"]] == [False, True, False] and report["passed"] is False
    assert report["checks"][2]["check"] == "evaluation" and "ZeroDivisionError" in report["checks"][2]["detail"]
    (tmp_path / "config.yaml").write_text("name: mine\n")
    for out, said in (("config.yaml", "is there already"), ("/proc/nothing/a.json", "cannot be written")):
        with pytest.raises(TrainError, match=said):
            main(f"out={out}")
    with pytest.raises(ConfigError, match="kil is not a word"):
        main("kil")
    assert (tmp_path / "config.yaml").read_text() == "name: mine\n"


def test_a_difference_counts_relative_to_its_tensor() -> None:
    one = {"weight": torch.tensor([100.0, 1.0]), "bias": torch.zeros(2)}
    assert largest_difference(one, one) == 0
    assert largest_difference(one | {"weight": torch.tensor([100.0, 2.0])}, one) == pytest.approx(0.01)
