"""The plots of a training or an evaluation: which there are, what they show, and their drawing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from train_utils.pictures.curves import draw_curves
from train_utils.pictures.score_charts import draw_confusion, draw_precision_recall
from train_utils.pictures.sheets import draw_detections
from train_utils.scores.detections import Detections, GroundTruth
from train_utils.scores.operating_points import pooled_curve

USUAL_THRESHOLD = 0.3  # where no detection is right, so that no score is better than another
LEAST_SHOWN = 0.1  # score of a box beside the labels: a young network's best threshold may be lower
FOLDER = "plots"  # in the folder of the run or of the evaluation
PLOTS = {  # titles by file name, in the order in which one looks at them
    "curves.png": "Losses, AP and learning rate by step; the dotted line is the best epoch",
    "precision_recall.png": "pycocotools' precision at each recall; the area under a line is its AP",
    "confusion.png": "Labelled boxes by the class that was reported for them",
    "val_detections.jpg": "The first validation images: labels left, detections right",
}

Say = Callable[[str], object]
Read = Callable[[int], np.ndarray | None]  # image (uint8 RGB) at a position of the data set; None: unreadable
NameOf = Callable[[int], str]


def draw_training(folder: Path, metrics_csv: Path, say: Say) -> None:
    """Draw the curves of a training into ``folder``."""
    _draw(folder / "curves.png", partial(draw_curves, metrics_csv), say)


def draw_evaluation(
    folder: Path, truth: GroundTruth, detections: Detections, read: Read, name_of: NameOf, say: Say
) -> None:
    """Draw the other PLOTS into ``folder``.

    ``read`` gives the image at a position, ``name_of`` its file name. What cannot be drawn is told
    by ``say``; an old picture in its place goes.
    """
    best = pooled_curve(truth, detections).best()
    threshold = best["threshold"] if best is not None else USUAL_THRESHOLD
    pairs = _first_images(truth, detections, read, name_of)
    drawings: dict[str, Callable[[Path], None]] = {
        "precision_recall.png": partial(draw_precision_recall, truth, detections),
        "confusion.png": partial(draw_confusion, truth, detections, threshold),
        "val_detections.jpg": lambda out: draw_detections(pairs, truth.names, out, max(threshold, LEAST_SHOWN)),
    }
    for name, draw in drawings.items():
        _draw(folder / name, draw, say)


def _draw(out: Path, draw: Callable[[Path], None], say: Say) -> None:
    """If drawing fails, only say so: what it shows is done, and must not be lost."""
    try:
        from hotcoco.plot import style

        out.parent.mkdir(parents=True, exist_ok=True)
        out.unlink(missing_ok=True)
        # hotcoco asks for bolder letters than its fonts have, which is nobody's news.
        logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
        with style(paper_mode=True):
            draw(out)
    except Exception as error:
        say(f"warning: {out} was not drawn ({type(error).__name__}: {error})")


def _first_images(
    truth: GroundTruth, detections: Detections, read: Read, name_of: NameOf, count: int = 8
) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray, Detections]]:
    """The first images with labels, crowds aside, and detections, as draw_detections takes them."""
    for i in range(min(count, len(truth.image_ids))):
        if (image := read(i)) is not None:
            rows = np.flatnonzero((truth.image_of_box == i) & ~truth.crowd.astype(bool))
            found = detections[detections["image_id"] == truth.image_ids[i]]
            yield name_of(i), image, truth.classes[rows], truth.boxes_xyxy(rows), found
