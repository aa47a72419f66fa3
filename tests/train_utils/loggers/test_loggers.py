"""Whole trainings with all loggers: what each service holds afterwards, also of a resumed run."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from threading import Event

import cv2
import numpy as np
import pytest
import torch
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from conf.schema import TrainConfig
from data import ShapesConfig, ensure_shapes
from tests.small_run import small_run
from train import train
from train_utils.distributed import init_distributed_mode
from train_utils.errors import TrainError
from train_utils.loggers.config import LoggerConfig, is_installed
from train_utils.loggers.interface import LoggedRun
from train_utils.loggers.loggers import open_loggers
from train_utils.loggers.tensorboard import TensorBoardLogger
from train_utils.run.checkpoint import load_last
from train_utils.run.run_state import LOSS_NAMES

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


def test_a_run_has_the_same_bits_with_loggers_which_get_its_figures_and_pictures(shapes: Path, tmp_path: Path) -> None:
    plain, logged = tmp_path / "plain", tmp_path / "logged"
    (logged / "plots").mkdir(parents=True)
    cv2.imwrite(str(logged / "plots/drawn.png"), np.full((8, 8, 3), 200, np.uint8))
    train(options(shapes, plain, "logger.every_steps=0"))
    train(options(shapes, logged, "logger=[csv,tensorboard]"))
    assert same_weights(plain, logged)
    with (logged / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4]
    events = EventAccumulator(str(logged / "tensorboard")).Reload()
    losses = events.Scalars("train/loss")
    assert [event.step for event in losses] == [1, 2, 3, 4]
    assert [event.value for event in losses] == pytest.approx([float(row["loss"]) for row in rows])
    assert events.Tags()["images"] == ["plots/drawn"]


def log_some(config: LoggerConfig, run: LoggedRun, steps: range, warnings: list[str], complete: bool) -> None:
    with open_loggers(config, init_distributed_mode("cpu", 60), run, warnings.append) as loggers:
        for step in steps:
            loggers.scalars(step, "train", {"lr": 0.1, **dict.fromkeys(LOSS_NAMES, step / 2)})
        loggers.pictures(steps[-1], "*.png")
        loggers.complete = complete


def test_a_resumed_run_goes_on_in_the_same_run_of_each_service(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # MLflow keeps artifacts of a file store in mlruns/ of the working folder
    store, folder, warnings = f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path / "run", list[str]()
    chosen = ["logger=[csv,tensorboard,wandb,mlflow]", "logger.wandb.mode=offline", f"logger.mlflow.uri={store}"]
    config = options(shapes, folder, *chosen).logger
    folder.mkdir()
    cv2.imwrite(str(folder / "drawn.png"), np.full((8, 8, 3), 200, np.uint8))
    log_some(config, LoggedRun(folder, 0, {"optim": {"lr": 0.1}}), range(1, 5), warnings, complete=False)
    log_some(config, LoggedRun(folder, 2, {"optim": {"lr": 0.1}}), range(3, 6), warnings, complete=True)
    assert warnings == []

    with (folder / "steps.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == [1, 2, 3, 4, 5]
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5]

    ids = json.loads((folder / "loggers.json").read_text())
    offline = list((folder / "wandb").glob(f"offline-run-*-{ids['wandb']}*/run-{ids['wandb']}.wandb"))
    assert len(offline) == 2 and all(b"train/loss" in file.read_bytes() for file in offline)
    assert list((folder / "wandb").glob("offline-run-*/files/media/images/drawn*.png"))

    client = MlflowClient(store)
    run = client.get_run(ids["mlflow"])
    assert run.info.status == "FINISHED" and run.data.params == {"optim.lr": "0.1"}
    assert {metric.step for metric in client.get_metric_history(ids["mlflow"], "train/loss")} == {1, 2, 3, 4, 5}
    assert len(client.search_runs([run.info.experiment_id])) == 1
    assert [file.path for file in client.list_artifacts(ids["mlflow"], "pictures")] == ["pictures/drawn.png"]


def test_a_logger_that_fails_warns_once_and_the_others_go_on(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    config, warnings = options(shapes, tmp_path, "logger=tensorboard").logger, list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(TensorBoardLogger, "scalars", full)
        log_some(config, LoggedRun(tmp_path, 0, {}), range(1, 4), warnings, complete=True)
    assert len(warnings) == 1 and "logger=tensorboard failed (OSError: no space left)" in warnings[0]
    assert (tmp_path / "steps.csv").read_text().count("\n") == 4

    monkeypatch.setattr(TensorBoardLogger, "__init__", full)
    with pytest.raises(TrainError, match=r"logger=tensorboard cannot start .*no space left.* fix:"):
        log_some(config, LoggedRun(tmp_path, 0, {}), range(1, 4), warnings, complete=True)
    log_some(config, LoggedRun(tmp_path, 2, {}), range(3, 4), warnings, complete=True)  # resumed at night
    assert len(warnings) == 2


def test_a_hung_service_neither_delays_the_training_nor_its_end(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, warnings = Event(), list[str]()
    monkeypatch.setattr(TensorBoardLogger, "scalars", lambda *_: answer.wait())
    monkeypatch.setattr("train_utils.loggers.background.MOST_WAITING", 5)
    monkeypatch.setattr("train_utils.loggers.loggers.PATIENCE", {True: 0.1, False: 0.1})
    config = options(shapes, tmp_path, "logger=tensorboard").logger
    log_some(config, LoggedRun(tmp_path, 0, {}), range(1, 30), warnings, complete=True)  # a wait here would never end
    answer.set()
    assert any("logger=tensorboard is far behind" in warning for warning in warnings)


def test_a_missing_extra_is_one_sentence(shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train_utils.loggers.config.is_installed", lambda module: module != "wandb")
    with pytest.raises(TrainError, match=r"^logger=wandb is not installed\. fix: uv sync --extra wandb"):
        options(shapes, tmp_path, "logger=[tensorboard,wandb]")
    monkeypatch.undo()
    (tmp_path / "no_such_service").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not is_installed("no_such_service")  # as wandb/ is, which a run leaves
