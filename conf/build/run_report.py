"""What a training keeps for its report and for comparisons, and the report itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from conf.build.evaluator import Evaluation
from conf.entry import defaults
from conf.schema import TrainConfig
from data import Annotations
from data.audit.summary import objects_per_image
from train_utils.report.best import Best, keep_best
from train_utils.report.run_files import read_files
from train_utils.report.run_report import write_report
from train_utils.run.same_training import flat
from train_utils.scores.detections import GroundTruth

Say = Callable[[str], object]


def keep_evaluation(folder: Path, truth: GroundTruth, evaluation: Evaluation, say: Say) -> None:
    """Keep labels and detections of the best epoch so far."""
    best = Best(evaluation.scores, truth, evaluation.detections)
    spare(say, "best_detections.npz", lambda: keep_best(folder, best))


def report_run(folder: Path, out: Path | None = None) -> Path:
    """Write the report of a run into ``out``, or its folder; return the file. Raises TrainError."""
    run = read_files(folder)
    # Of the defaults, only the name stands for another option.
    by_default = _defaults() | {"name": run.options["data.name"]}
    return write_report(run, (out or folder) / "report.html", by_default)


@cache  # for the jobs of a sweep
def _defaults() -> dict[str, Any]:
    return flat(defaults("train", TrainConfig))


def summary_of(part: Annotations) -> dict[str, int]:
    """What a set holds."""
    empty = int((objects_per_image(part) == 0).sum())
    return {"images": len(part), "without boxes": empty, "boxes": len(part.classes), "classes": len(part.names)}


def spare(say: Say, what: str, make: Callable[[], object]) -> None:
    """Make something that a training can do without; tell by ``say`` if that fails."""
    try:
        make()
    except Exception as error:  # whatever it is, it is worth a line and not the training
        say(f"warning: {what} was not written ({type(error).__name__}: {error})")
