"""How many ranks ``devices`` asks for."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from conf import programs
from conf.entry import compose
from conf.failures import ConfigError
from conf.programs import ranks_to_start, run
from conf.schema import TrainConfig


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher and four GPUs."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "RANK", "WORLD", "TORCHELASTIC"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def config_of(*options: str) -> Any:
    return compose("train", TrainConfig, list(options))


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ([], 1),
        (["devices=1"], 1),
        (["devices=3"], 3),
        (["devices=auto"], 4),
        (["devices=6", "train.device=cpu"], 6),
        (["devices=auto", "train.device=cpu"], 1),
    ],
)
def test_devices_are_a_number_of_ranks(options: list[str], count: int) -> None:
    assert ranks_to_start(config_of(*options)) == count


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"devices=5 needs 5 GPUs, and torch finds 4 here\. fix: devices=auto"):
        ranks_to_start(config_of("devices=5"))


@pytest.mark.parametrize("devices", ["0", "two", "[0,1]"])
def test_anything_but_a_number_is_refused(devices: str) -> None:
    with pytest.raises(ConfigError, match="devices must be a number of processes, or auto"):
        config_of(f"devices={devices}")


def test_a_rank_starts_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert ranks_to_start(config_of("devices=2")) == 1


def test_a_multirun_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execv", lambda *command: pytest.fail(f"{command}"))
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "devices=2,3", "data=shapes", "hydra.sweep.dir=mine"])
    monkeypatch.setattr(programs, "_let_signals_end_all_jobs", lambda: None)  # the tests go on in this process
    with pytest.raises(SystemExit) as ended:
        run("train")
    assert ended.value.code == 2
    assert "devices=2 is for one setting. fix: start each by itself" in capsys.readouterr().err
