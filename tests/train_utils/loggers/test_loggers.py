"""Whole trainings with all loggers: what each service holds afterwards, also of a resumed run."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from conf.schema import TrainConfig
from data import ShapesConfig, ensure_shapes
from tests.small_run import small_run
from train import train
from train_utils.run.checkpoint import load_last

SHAPES = ShapesConfig(train_images=18, val_images=5, image_size=64, seed=0)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loggers") / "shapes"
    ensure_shapes(path, SHAPES)
    return path


def options(shapes: Path, run_dir: Path, *more: str) -> TrainConfig:
    own = ("train.batch_size=8", "train.epochs=2", "evaluate.every=1", "logger.every_steps=1")
    return small_run(shapes, SHAPES, run_dir, *own, *more)


def same_weights(one: Path, other: Path) -> bool:
    a, b = (load_last(folder)[0]["model"] for folder in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_the_dry_parts(shapes: Path, tmp_path: Path) -> None:
    plain, logged = tmp_path / "plain", tmp_path / "logged"
    train(options(shapes, plain, "logger.every_steps=0"))
    train(options(shapes, logged, "logger=[csv,tensorboard]", "logger.pictures=true"))
    assert same_weights(plain, logged)
    with (logged / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4]
    events = EventAccumulator(str(logged / "tensorboard")).Reload()
    losses = events.Scalars("train/loss")
    assert [event.step for event in losses] == [1, 2, 3, 4]
    assert [event.value for event in losses] == pytest.approx([float(row["loss"]) for row in rows])
    drawn = {path.relative_to(logged).with_suffix("").as_posix() for path in logged.glob("plots/*")} | {"train_batch"}
    assert set(events.Tags()["images"]) == drawn and len(drawn) > 3
