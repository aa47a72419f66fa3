"""Whole trainings with all loggers: what each service holds afterwards, also of a resumed run."""

import csv
import os
import signal
from collections import Counter
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import cv2
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from conf import TrainError
from conf.schema import TrainConfig
from tests.small_run import rows as table_of
from tests.small_run import small_run
from train import train
from train_utils.checkpoint import load_last
from train_utils.distributed import World
from train_utils.report import loggers as module
from train_utils.report.run_report import RunReport
from train_utils.train_state import LOSS_NAMES

pytestmark = pytest.mark.release


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loggers") / "shapes"


def options(shapes: Path, run_dir: Path, *more: str) -> TrainConfig:
    own = ("train.batch_size=6", "train.epochs=2", "evaluate.every=1", "logger.every_steps=1")
    return small_run(shapes, run_dir, *own, *more)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_last(folder)[0]["model"])


def test_a_run_stopped_and_resumed_is_one_run_in_each_service_and_has_the_bits_of_one_without(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, folder, chosen = tmp_path / "plain", tmp_path / "run", ["logger=[csv,tensorboard,wandb]"]
    monkeypatch.setenv("WANDB_MODE", "offline")
    train(options(shapes, plain, "logger.every_steps=0"))
    log_step = RunReport.step

    def stop_after_five(self: RunReport, step: int, metrics: dict[str, float]) -> None:
        log_step(self, step, metrics)
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)  # seen after the next step

    monkeypatch.setattr(RunReport, "step", stop_after_five)
    monkeypatch.setattr(module, "END_SECONDS", 300)
    close, complete = module.WandbLogger.close, list[bool]()

    def noted(self: module.WandbLogger, is_whole: bool) -> None:
        complete.append(is_whole)
        close(self, is_whole)

    monkeypatch.setattr(module.WandbLogger, "close", noted)
    train(options(shapes, folder, *chosen))
    (folder / "plots").mkdir(exist_ok=True)
    cv2.imwrite(str(folder / "plots/drawn.png"), np.full((8, 8, 3), 200, np.uint8))
    run_id = (folder / "run_id.txt").read_text()
    train(options(shapes, folder, *chosen, f"resume={folder}", "run_dir=null"))
    a, b = weights(plain), weights(folder)
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    log = (folder / "train.log").read_text()
    assert "stopped at step 5 by SIGTERM" in log and "warning" not in log and complete == [False, True]
    with (folder / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    losses = events.Scalars("train/loss")
    assert [event.step for event in losses] == [1, 2, 3, 4, 5, 6]
    assert [event.value for event in losses] == pytest.approx([float(row["loss"]) for row in rows])
    assert [event.value for event in events.Scalars("val/loss")] == pytest.approx(
        [float(row["val_loss"]) for row in table_of(folder)]
    )
    (best,) = events.Scalars("val_best/AP")
    assert best.value == pytest.approx(max(float(row["AP"]) for row in table_of(folder)))
    assert events.Tags()["images"] == ["val_plots/drawn"]
    assert {path.name for path in folder.glob("wandb/offline-run-*/*.wandb")} == {f"run-{run_id}.wandb"}
    assert list(folder.glob("wandb/offline-run-*/files/media/images/val_plots/drawn*.png"))


class Service:
    """A service as the loggers know it, whose methods a test replaces."""

    def __init__(self, *_: object) -> None: ...

    def scalars(self, *_: object) -> None: ...

    def close(self, complete: bool) -> None: ...


def log_some(config: TrainConfig, folder: Path, steps: range, warnings: list[str]) -> None:
    world = World(0, 0, 1, 1, 1, torch.device("cpu"), "none")
    state, batches = SimpleNamespace(step=steps[0] - 1, epoch=0), SimpleNamespace(steps_per_epoch=9)
    with RunReport(folder, config, world) as report:
        report.line = lambda *texts, on_terminal=True: warnings.extend(map(str, texts) if on_terminal else ())
        report.start(config, cast(Any, state), cast(Any, None), cast(Any, batches))
        for state.step in steps:
            report.step(state.step, {"lr": 0.1, **dict.fromkeys(LOSS_NAMES, state.step / 2)})


def failing(*_: object) -> None:
    raise OSError("no space left")


def test_a_logger_that_fails_warns_once_and_the_others_go_on(shapes, tmp_path, monkeypatch) -> None:
    config, warnings = options(shapes, tmp_path, "logger=[tensorboard,wandb]"), list[str]()
    points = Counter[str]()
    monkeypatch.setitem(module.SERVICES, "tensorboard", type("Failing", (Service,), {"scalars": failing}))
    good = type("Good", (Service,), {"scalars": lambda self, step, group, metrics: points.update([group])})
    monkeypatch.setitem(module.SERVICES, "wandb", good)
    log_some(config, tmp_path, range(1, 4), warnings)
    assert len(warnings) == 1 and "logger=tensorboard failed (OSError: no space left)" in warnings[0]
    assert (tmp_path / "steps.csv").read_text().count("\n") == 4 and points == {"train": 3}
    monkeypatch.setitem(module.SERVICES, "tensorboard", failing)
    with pytest.raises(TrainError, match=r"logger=tensorboard cannot start .*no space left.* fix:"):
        log_some(config, tmp_path, range(1, 4), warnings)
    with (tmp_path / "steps.csv").open("a") as file:
        file.writelines(f"{step},0.1,{step / 2},9,9,9\n" for step in (1, 2, 3, 4))
        file.write("5,0.1")  # as after a kill
    log_some(config, tmp_path, range(3, 4), warnings)  # resumed at night, after step 2
    assert len(warnings) == 2
    rows = list(csv.DictReader((tmp_path / "steps.csv").read_text().splitlines()))
    assert [(row["step"], row["loss"]) for row in rows] == [("1", "0.5"), ("2", "1.0"), ("3", "1.5")], "told twice"


@pytest.mark.parametrize("where", ["a message", "the end"])
def test_a_hung_service_delays_neither_the_training_nor_its_end(shapes, tmp_path, monkeypatch, where) -> None:
    answer, warnings = Event(), list[str]()

    def hang(*_: object) -> None:
        answer.wait()

    method = {"a message": "scalars", "the end": "close"}[where]
    monkeypatch.setitem(module.SERVICES, "tensorboard", type("Hung", (Service,), {method: hang}))
    monkeypatch.setattr(module, "END_SECONDS", 0.1)
    log_some(options(shapes, tmp_path, "logger=tensorboard"), tmp_path, range(1, 30), warnings)
    answer.set()
    assert len(warnings) == 1 and "training is not affected" in warnings[0]
    assert (tmp_path / "steps.csv").read_text().count("\n") == 30


def test_a_missing_extra_is_one_sentence(shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conf.schema.is_installed", lambda module: module != "wandb")
    with pytest.raises(TrainError, match=r"^logger=wandb is not installed\. fix: uv pip install .* wandb, or"):
        options(shapes, tmp_path, "logger=[tensorboard,wandb]")
