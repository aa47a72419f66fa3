"""What a training keeps for its report and for comparisons, and the report itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from conf.build.evaluator import Evaluation
from conf.entry import defaults
from conf.schema import TrainConfig
from data import Annotations
from data.audit.summary import objects_per_image
from train_utils.distributed import World
from train_utils.report.about import keep_start
from train_utils.report.best import Best, keep_best
from train_utils.report.run_files import flat, read_files
from train_utils.report.run_report import write_report
from train_utils.scores.detections import GroundTruth

Say = Callable[[str], object]


def keep_about(folder: Path, config: TrainConfig, world: World, sets: dict[str, Annotations], say: Say) -> None:
    """Keep what the run starts on, on rank 0."""
    if world.is_main:
        data = {name: summary_of(part) for name, part in sets.items()}
        spare(say, "about.json", lambda: keep_start(folder, config.train.precision.value, data, world))


def keep_evaluation(folder: Path, epoch: int, truth: GroundTruth, evaluation: Evaluation, say: Say) -> None:
    """Keep labels and detections of the best epoch so far."""
    best = Best(epoch, evaluation.scores, truth, evaluation.detections)
    spare(say, "best_detections.npz", lambda: keep_best(folder, best))


def report_run(folder: Path) -> Path:
    """Write the report of a run and return its file. Raises TrainError or OSError."""
    return write_report(read_files(folder), default_options())


def default_options() -> dict[str, Any]:
    """The values of train.py's options by full key, without any choice on the command line."""
    values = flat(defaults("train", TrainConfig))
    for key, value in values.items():
        if isinstance(value, str) and value.startswith("${"):
            values[key] = values[value[2:-1]]
    return values


def summary_of(part: Annotations) -> dict[str, Any]:
    """What a set holds: figures by words, and boxes by class."""
    boxes = np.bincount(part.classes, minlength=len(part.names)).tolist()
    empty = int((objects_per_image(part) == 0).sum())
    counts = {"images": len(part), "images without boxes": empty, "boxes": len(part.classes), "classes": len(boxes)}
    figures = {name: f"{count:,}" for name, count in counts.items()}
    return {"figures": figures, "classes": dict(zip(part.names, boxes, strict=True))}


def spare(say: Say, what: str, make: Callable[[], object]) -> None:
    """Make something that a training can do without; tell by ``say`` if that fails."""
    try:
        make()
    except Exception as error:  # whatever it is, it is worth a line and not the training
        say(f"warning: {what} was not written ({type(error).__name__}: {error})")
