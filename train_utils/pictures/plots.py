"""The plots of a training or an evaluation: which there are, what they show, and their drawing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train_utils.errors import TrainError
from train_utils.pictures.charts import draw_labels
from train_utils.pictures.curves import draw_curves
from train_utils.pictures.mistakes import NameOf, Read, draw_suspects, draw_worst
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
    "calibration.png": Plot("Calibration", "How often detections of a score are right, and the gap to the score."),
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
    _draw(folder / "curves.png", partial(draw_curves, metrics_csv), say)
    _draw(folder / "labels_train.png", partial(draw_labels, train_labels, "training"), say)


def draw_evaluation(
    folder: Path,
    truth: GroundTruth,
    detections: Detections,
    scores: CocoResult,
    read: Read,
    name_of: NameOf,
    say: Say,
) -> None:
    """Draw the other PLOTS into ``folder``.

    ``read`` gives the image at a position, ``name_of`` its file name. What cannot be drawn is told
    by ``say``; an old picture in its place goes.
    """
    with _or_say(folder, say):
        found = diagnose(truth, detections)
        pairs, least = _first_images(truth, detections, read, name_of), max(found.threshold, LEAST_SHOWN)
        drawings: dict[str, Callable[[Path], None]] = {
            "average_precision.png": partial(draw_average_precision, scores),
            "precision_recall.png": partial(draw_precision_recall, found),
            "confidence.png": partial(draw_confidence, found),
            "confusion.png": partial(draw_confusion, found, False),
            "confusion_share.png": partial(draw_confusion, found, True),
            "error_kinds.png": partial(draw_error_kinds, found),
            "calibration.png": partial(draw_calibration, found),
            "val_detections.jpg": lambda out: draw_detections(pairs, truth.names, out, least),
            "worst_images.jpg": partial(draw_worst, found, read, name_of),
            "label_suspects.jpg": partial(draw_suspects, found, read, name_of),
            "labels_val.png": partial(draw_labels, truth, "validation"),
        }
        for name, draw in drawings.items():
            _draw(folder / name, draw, say)


def _draw(out: Path, draw: Callable[[Path], None], say: Say) -> None:
    with _or_say(out, say):
        from hotcoco.plot import style

        out.parent.mkdir(parents=True, exist_ok=True)
        out.unlink(missing_ok=True)
        # hotcoco asks for bolder letters than its fonts have, which is nobody's news.
        logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
        with style(paper_mode=True):
            draw(out)


@contextmanager
def _or_say(out: Path, say: Say) -> Iterator[None]:
    """If drawing fails, only say so: what it shows is done, and must not be lost."""
    try:
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, TrainError) else f"{type(error).__name__}: {error}"
        say(f"warning: {out} was not drawn ({reason})")


def _first_images(
    truth: GroundTruth, detections: Detections, read: Read, name_of: NameOf, count: int = 8
) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray, Detections]]:
    """The first images with labels, crowds aside, and detections, as draw_detections takes them."""
    for i in range(min(count, len(truth.image_ids))):
        if (image := read(i)) is not None:
            rows = np.flatnonzero((truth.image_of_box == i) & ~truth.crowd.astype(bool))
            found = detections[detections["image_id"] == truth.image_ids[i]]
            yield name_of(i), image, truth.classes[rows], truth.boxes_xyxy(rows), found
