"""The plots of a training or an evaluation: which there are, what they show, and their drawing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train_utils.errors import TrainError
from train_utils.pictures.charts import draw_labels
from train_utils.pictures.curves import draw_curves
from train_utils.pictures.mistakes import Read, draw_suspects, draw_worst
from train_utils.pictures.score_charts import (
    draw_average_precision,
    draw_calibration,
    draw_confidence,
    draw_confusion,
    draw_error_kinds,
    draw_precision_recall,
)
from train_utils.pictures.sheets import draw_detections
from train_utils.scores.coco_eval import CocoResult
from train_utils.scores.detections import Detections, GroundTruth
from train_utils.scores.diagnosis import diagnose

LEAST_SHOWN = 0.1  # score of a box beside the labels: a young network's best threshold may be lower
FOLDER = "plots"  # in the folder of the run or of the evaluation


class Plot(NamedTuple):
    """What a file of the folder ``plots`` shows."""

    title: str
    caption: str


PLOTS = {  # by file name, in the order in which one looks at them
    "curves.png": Plot("Training curves", "Losses, AP and learning rate by step; the dotted line is the best epoch."),
    "average_precision.png": Plot("AP by class and size", "AP and AP50 of each class, and AP by the size of the box."),
    "precision_recall.png": Plot(
        "Precision and recall", "pycocotools' precision at each recall; the area under a line is its AP."
    ),
    "confidence.png": Plot(
        "Precision, recall and F1 by score", "What remains if only detections from a score on are reported."
    ),
    "confusion.png": Plot("Confusion matrix", "Labelled boxes by the class that was reported for them, counted."),
    "confusion_share.png": Plot("Confusion matrix, normalised", "The same as shares of each row."),
    "error_kinds.png": Plot("Kinds of errors", "How much AP50 would rise without each kind of error (TIDE)."),
    "calibration.png": Plot("Calibration", "How often detections of a score are right, and how many there are."),
    "val_detections.jpg": Plot("Labels and detections", "The first validation images: labels left, detections right."),
    "worst_images.jpg": Plot(
        "Worst images", "Most missed labels, then most false detections, with the reason of each error."
    ),
    "label_suspects.jpg": Plot(
        "Labels that may be wrong", "Sure detections that contradict the labels: blue detected, red labelled."
    ),
    "labels_train.png": Plot("Training labels", "Classes, centres, shapes and areas of the training boxes."),
    "labels_val.png": Plot("Validation labels", "Classes, centres, shapes and areas of the validation boxes."),
}

Say = Callable[[str], object]


def draw_training(folder: Path, metrics_csv: Path, train_labels: GroundTruth, say: Say) -> None:
    """Draw what only a training has: its curves and its labels."""
    _draw(folder, "curves.png", lambda out: draw_curves(metrics_csv, out), say)
    _draw(folder, "labels_train.png", lambda out: draw_labels(train_labels, "training", out), say)


def draw_evaluation(
    folder: Path,
    truth: GroundTruth,
    detections: Detections,
    scores: CocoResult,
    read: Read,
    name_of: Callable[[int], str],
    say: Say,
) -> None:
    """Draw the other PLOTS into ``folder``.

    ``read`` gives the image at a position (uint8 RGB; None if unreadable), ``name_of`` its file
    name. What cannot be drawn is told by ``say``; an old picture in its place goes.
    """
    try:
        found = diagnose(truth, detections)
    except Exception as error:  # as in _draw
        say(f"warning: {folder} was not drawn ({type(error).__name__}: {error})")
        return
    names, boxes = truth.names, [curve.boxes for curve in found.curves]
    drawings: dict[str, Callable[[Path], object]] = {
        "average_precision.png": lambda out: draw_average_precision(scores.figures, scores.per_class, out),
        "precision_recall.png": lambda out: draw_precision_recall(found.precision, boxes, names, out),
        "confidence.png": lambda out: draw_confidence(found.curves, found.pooled, found.threshold, names, out),
        "confusion.png": lambda out: draw_confusion(found.confusion, names, found.threshold, out),
        "confusion_share.png": lambda out: draw_confusion(found.confusion_share, names, found.threshold, out),
        "error_kinds.png": lambda out: draw_error_kinds(found.tide, out),
        "calibration.png": lambda out: draw_calibration(found.calibration, out),
        "val_detections.jpg": lambda out: draw_detections(
            _first_images(truth, detections, read, name_of), names, out, max(found.threshold, LEAST_SHOWN)
        ),
        "worst_images.jpg": lambda out: draw_worst(truth, found, read, name_of, out),
        "label_suspects.jpg": lambda out: draw_suspects(truth, found.suspects, read, name_of, out),
        "labels_val.png": lambda out: draw_labels(truth, "validation", out),
    }
    for name, drawing in drawings.items():
        _draw(folder, name, drawing, say)


def _draw(folder: Path, name: str, drawing: Callable[[Path], object], say: Say) -> None:
    """Draw one file. If that fails, only say so: what it shows is done, and must not be lost."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        drawing(folder / name)
    except Exception as error:
        reason = str(error) if isinstance(error, TrainError) else f"{type(error).__name__}: {error}"
        say(f"warning: {folder / name} was not drawn ({reason})")


def _first_images(
    truth: GroundTruth, detections: Detections, read: Read, name_of: Callable[[int], str], count: int = 8
) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray, Detections]]:
    """The first images with labels, crowds aside, and detections, as draw_detections takes them."""
    for i in range(min(count, len(truth.image_ids))):
        if (image := read(i)) is None:
            continue
        rows = np.arange(truth.offsets[i], truth.offsets[i + 1])
        rows = rows[~truth.crowd[rows].astype(bool)]
        boxes = truth.boxes_xywh[rows].copy()
        boxes[:, 2:] += boxes[:, :2]
        yield name_of(i), image, truth.classes[rows], boxes, detections[detections["image_id"] == truth.image_ids[i]]
