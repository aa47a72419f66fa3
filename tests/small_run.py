"""The options of a training of seconds, its table, and how it dies: for tests around trainings."""

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from conf import TrainError
from conf.cli.program import options_of
from conf.schema import TrainConfig
from data import ShapesConfig
from data.shapes import CLASSES
from models import Darknet, zoo_cfg
from train_utils.checkpoint import CheckpointWriter

SHAPES = ShapesConfig(train_images=18, val_images=5, image_size=64)


def small_run(root: Path, run_dir: Path, *more: str, shapes: ShapesConfig = SHAPES) -> TrainConfig:
    """A narrow yolov3-tiny on the drawn shapes in ``root``, without workers or pictures."""
    drawn = ", ".join(f"{key}: {value}" for key, value in asdict(shapes).items())
    config: TrainConfig = options_of(
        "train",
        [
            "data=shapes", f"data.root={root}", f"data.index_dir={root.parent / 'index'}", "data.workers=0",
            f"data.shapes={{{drawn}}}", "model=yolov3-tiny", "model.width=0.125", "train.image_size=64",
            "device=cpu", "evaluate.every=0", "logger.pictures=false", f"run_dir={run_dir}", *more,
        ],
    )  # fmt: skip
    return config


def random_weights(path: Path, name: str = "yolov3-tiny") -> str:
    """The option that gives such a network random weights that count as loaded."""
    torch.save(Darknet(zoo_cfg(name), len(CLASSES), 0.125).state_dict(), path)
    return f"model.weights={path}"


@contextmanager
def dying_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> Iterator[None]:
    """Expect the TrainError that comes after ``steps`` steps, once their checkpoint is written."""
    is_due = CheckpointWriter.is_due

    def dies(self: CheckpointWriter, step: int) -> bool:
        if step > steps:
            assert self.pending is not None and self.pending.exception() is None, "a thread writes it"
            raise TrainError("power cut")
        return is_due(self, step)

    with monkeypatch.context() as patch, pytest.raises(TrainError, match="power cut"):
        patch.setattr(CheckpointWriter, "is_due", dies)
        yield


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))
