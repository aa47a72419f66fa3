"""Recorded trainings: each command composes, and a metric outside its interval is told."""

import shlex
from pathlib import Path

import pytest

from conf import ConfigError
from conf.compose import compose
from conf.run import Outcome
from conf.schema import TrainConfig
from scripts.bench import rerun


@pytest.mark.parametrize("row", rerun.read_rows().values(), ids=lambda row: row["row"])
def test_a_recorded_training_has_its_seed_and_lies_in_its_interval(row: dict[str, str]) -> None:
    _, program, *options = shlex.split(row["command"])
    assert program == "train.py"
    assert compose("train", TrainConfig, options).train.seed == int(row["seed"])
    assert all(float(row["low"]) < float(value) < float(row["high"]) for value in row["value"].split())


def test_a_metric_outside_the_interval_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = rerun.read_rows()["shapes-tiny"]
    started: list[str] = []
    for value, is_within in ((row["low"], True), (row["high"], True), (0, False), (1, False)):
        started.clear()
        monkeypatch.setattr(rerun, "train", lambda o, v=value: started.extend(o) or Outcome({"AP": float(v)}, tmp_path))
        assert rerun.rerun("shapes-tiny") == is_within
        assert started[:-1] == shlex.split(row["command"])[2:] and started[-1].startswith("run_dir=runs/rerun/shapes")
        assert ("OUTSIDE" in capsys.readouterr().out) != is_within
    with pytest.raises(ConfigError, match="fix: one of shapes-tiny"):
        rerun.rerun("nothing")
