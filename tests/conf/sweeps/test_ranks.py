"""Which processes ``devices`` starts, and on which GPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.entry import compose
from conf.failures import ConfigError
from conf.programs import run
from conf.schema import TrainConfig
from conf.sources.resume import complete_training
from conf.sweeps.ranks import run_on_devices, wants_ranks
from train_utils.launch import agent


class Ranks:
    """In place of the agent: the starts that it was asked for, with the variables that they see."""

    def __init__(self) -> None:
        self.starts: list[tuple[list[str], int, str | None, str]] = []
        self.code = 0

    def __call__(self, command: Sequence[str], count: int) -> int:
        seen, threads = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ["OMP_NUM_THREADS"]
        self.starts.append((list(command), count, seen, threads))
        return self.code


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """No launcher and four GPUs, of which CUDA_VISIBLE_DEVICES may leave some."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "RANK", "WORLD", "TORCHELASTIC"))]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def device_count() -> int:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        return 4 if seen is None else len([name for name in seen.split(",") if name])

    monkeypatch.setattr(torch.cuda, "device_count", device_count)
    made = Ranks()
    monkeypatch.setattr(agent, "run_ranks", made)
    return made


def config_of(*options: str) -> Any:
    return compose("train", TrainConfig, list(options))


@pytest.mark.parametrize(
    ("options", "seen", "expected"),
    [
        (["devices=3"], None, (3, None)),
        (["devices=auto"], None, (4, None)),
        (["devices=auto"], "5,7", (2, "5,7")),
        (["devices=6", "train.device=cpu"], None, (6, None)),
        (["devices=auto", "train.device=cpu"], None, (1, None)),
        (["devices=2"], "", (2, "")),
    ],
)
def test_devices_become_ranks_on_gpus(
    options: list[str],
    seen: str | None,
    expected: tuple[int, str | None],
    ranks: Ranks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    before, config = dict(os.environ), config_of(*options)
    assert wants_ranks(config)
    run_on_devices(config, ["train.py"])
    ((command, count, saw, threads),) = ranks.starts
    assert (command, (count, saw)) == (["train.py"], expected) and int(threads) >= 1
    assert dict(os.environ) == before


def test_more_ranks_than_gpus_are_refused(ranks: Ranks) -> None:
    with pytest.raises(ConfigError, match=r"devices=5 needs 5 GPUs, and torch finds 4 here\. fix: devices=auto"):
        run_on_devices(config_of("devices=5"), ["train.py"])
    assert ranks.starts == []


def test_a_launcher_and_devices_exclude_each_other(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not wants_ranks(config_of()) and not wants_ranks(config_of("devices=1"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"devices=2 starts processes itself, and a launcher .* fix: python without"):
        wants_ranks(config_of("devices=2"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "devices-1")
    assert not wants_ranks(config_of("devices=2")), "a rank started ranks"


def test_a_resumed_run_takes_its_devices_along_unless_a_launcher_starts_it(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text("devices: 2\ntrain: {epochs: 3}\n")
    given = [f"resume={tmp_path}"]
    assert compose("train", TrainConfig, given, complete_training).devices == 2
    assert compose("train", TrainConfig, [*given, "devices=4"], complete_training).devices == 4
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert compose("train", TrainConfig, given, complete_training).devices is None


def test_a_multirun_is_refused(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "devices=1,2", "data=shapes", "hydra.sweep.dir=mine"])
    with pytest.raises(SystemExit) as ended:
        run("train")
    assert ended.value.code == 2 and ranks.starts == []
    said = capsys.readouterr().err
    assert "job 2 (devices=2 " in said and "devices=2 is for one setting. fix: start each by itself" in said


def test_the_exit_code_of_the_ranks_is_that_of_the_program(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.code = 2
    monkeypatch.setattr(sys, "argv", ["eval.py", "devices=2", "data=shapes", "model=yolov3-tiny"])
    with pytest.raises(SystemExit) as ended:
        run("eval")
    assert ended.value.code == 2 and capsys.readouterr().err == ""
