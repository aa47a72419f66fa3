"""Layers that are frozen for the first part of a training, on several processes and resumed."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.entry import compose
from conf.schema import TrainConfig
from conf.sources.resume import complete_training
from data import ShapesConfig, ensure_shapes
from tests.models.cfg_writer import cfg, conv, head
from tests.runs.kill_resume import differences
from tests.runs.process_group import run_group
from train import train
from train_utils.loop.step import OptimiserStep
from train_utils.run.checkpoint import load_last

pytestmark = pytest.mark.slow
ADD = OptimiserStep.add


def train_in_parts(folder: Path, run_dir: Path, stops: list[int]) -> None:
    """This rank's part of a training that ends after each of the steps ``stops`` and is resumed."""

    def add(step: OptimiserStep, batch: Any) -> None:
        if step.state.step + 1 in stops:
            stops.remove(step.state.step + 1)
            os.kill(os.getpid(), signal.SIGUSR1)
        ADD(step, batch)

    setattr(OptimiserStep, "add", add)  # noqa: B010 - in this process alone
    given = [
        "data=shapes", f"data.root={folder / 'shapes'}", f"data.index_dir={folder / 'index'}", "data.workers=0",
        "data.shapes={train_images: 13, val_images: 2, image_size: 64, seed: 0}", f"model.cfg={folder / 'net.cfg'}",
        "model.freeze=2", "model.freeze_fraction=0.5", "train.image_size=64", "train.batch_size=6", "train.epochs=4",
        "train.micro_batch_size=3", "optim=adamw",
        "train.device=cpu", "train.precision=float32", "evaluate.every=0", "evaluate.confidence=0.9",
        "logger.pictures=false",
    ]  # fmt: skip
    train(compose("train", TrainConfig, [*given, f"run_dir={run_dir}"]))
    if stops and os.environ["RANK"] == "0":
        shutil.copytree(run_dir, folder / "frozen")
    while load_last(run_dir)[0]["epoch"] < 4:
        train(compose("train", TrainConfig, [f"resume={run_dir}"], complete_training))


def test_released_layers_are_trained_and_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    """Stops while layers are frozen, where they are released, and after that; DDP on 3 ranks."""
    ensure_shapes(tmp_path / "shapes", ShapesConfig(train_images=13, val_images=2, image_size=64, seed=0))
    middle = conv(7, 3, 2) + conv(8, 3, 2, "mish") + conv(9, 3, 2)
    (tmp_path / "net.cfg").write_text(cfg(middle, head(0, 1), side=64))
    for name, stops in (("whole", []), ("parts", [3, 4, 6])):
        run_group(train_in_parts, 3, tmp_path, tmp_path / name, stops)
    frozen, whole, parts = (load_last(tmp_path / name)[0] for name in ("frozen", "whole", "parts"))
    assert (frozen["step"], whole["step"], parts["step"]) == (3, 8, 8)
    for part in ("model", "ema", "optimizer"):
        assert differences(whole[part], parts[part]) == [], part

    still = {name for name in frozen["model"] if name.startswith(("layers.0.", "layers.1."))}
    for name in frozen["model"]:
        moved = not torch.equal(frozen["model"][name], whole["model"][name])
        assert moved or name.endswith("tracked"), f"{name} is not trained"
    groups = frozen["optimizer"]["param_groups"]
    names = {number: name for group in groups for name, number in zip(group["names"], group["params"], strict=True)}
    assert {names[number] for number in frozen["optimizer"]["state"]} == set(names.values()) - still
    assert set(whole["optimizer"]["state"]) == set(names)
    log = (tmp_path / "whole" / "train.log").read_text()
    assert log.count("epoch 3: the layers that were frozen are trained from here on") == 1
