"""What a resumed run says about its options; the rest of a run's state is tested by tests/test_train.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from train_utils.distributed import init_distributed_mode
from train_utils.errors import TrainError
from train_utils.numerics import autocast_dtype
from train_utils.run_folder import open_run_folder
from train_utils.run_state import changed_values


def test_changed_options_are_listed_by_full_key() -> None:
    before = {"train": {"epochs": 3, "seed": 0}, "optim": {"lr": 0.01}, "resume": None, "old": 1}
    now = {"train": {"epochs": 5, "seed": 0}, "optim": {"lr": 0.02}, "resume": "runs/x"}
    assert changed_values(before, now) == ["train.epochs: 3 -> 5", "optim.lr: 0.01 -> 0.02", "old: 1 -> None"]
    assert changed_values(before, before) == []


def test_run_folders_of_one_second_stay_apart_and_slurm_jobs_have_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    world = init_distributed_mode("cpu", 60)
    folders = {open_run_folder(world, "name", None, None) for _ in range(3)}
    assert len(folders) == 3 and all(folder.parent == tmp_path / "runs" / "name" for folder in folders)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    assert open_run_folder(world, "name", None, None) == tmp_path / "runs" / "name" / "torchrun-7"
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    assert open_run_folder(world, "name", None, None) == tmp_path / "runs" / "name" / "slurm-41"
    assert open_run_folder(world, "name", "here", None) == tmp_path / "here"
    (tmp_path / "here" / "metrics.csv").write_text("epoch\n")
    assert open_run_folder(world, "name", "here", None) == tmp_path / "here", "nothing is lost by beginning again"
    (tmp_path / "here" / "metrics.csv").write_text("epoch\n1\n")
    with pytest.raises(TrainError, match="already holds a run"):
        open_run_folder(world, "name", "here", None)
    assert open_run_folder(world, "name", None, "here") == tmp_path / "here"


def test_precision_names_its_dtype_and_refuses_what_a_cpu_cannot() -> None:
    cpu = torch.device("cpu")
    assert autocast_dtype("float32", cpu) is None
    assert autocast_dtype("bfloat16", cpu) is torch.bfloat16
    assert autocast_dtype("auto", cpu) in (None, torch.bfloat16)
    with pytest.raises(TrainError, match=r"train\.precision=float16 needs a GPU\. fix:"):
        autocast_dtype("float16", cpu)
