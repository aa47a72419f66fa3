"""Charts of one evaluation: precision and recall, and which classes are confused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from train_utils.pictures.style import chart, label, line_style, save, write_instead
from train_utils.scores.coco_backends import columns, curves, hotcoco_evaluation
from train_utils.scores.detections import Detections, GroundTruth
from train_utils.scores.operating_points import IOU

RECALLS = np.linspace(0, 1, 101)  # pycocotools' sample of the recalls
NAMED = 10  # classes with a line of their own in the legend; 12 pairs of colour and dashes differ
GREY: dict[str, Any] = {"color": "0.8", "linewidth": 0.8, "zorder": 1}
MOST_ROWS = 30  # classes of a whole confusion matrix; of more, hotcoco draws the 25 most confused


def draw_precision_recall(truth: GroundTruth, detections: Detections, out: Path) -> None:
    """Draw pycocotools' precision over recall; the mean height of a line is its AP."""
    precision = curves(truth, detections, "hotcoco").precision[..., 0, 2]  # (IoU thresholds, recalls, classes)
    boxes = np.bincount(truth.classes[~truth.crowd.astype(bool)], minlength=len(truth.names))
    order = [cls for cls in np.argsort(boxes)[::-1] if precision[0, 0, cls] > -1]
    figure, axes = chart(14, 4.6, 2)
    for axis, values, title in (
        (axes[0], precision[0], "IoU .5: the area is AP50"),
        (axes[1], precision.mean(0), "mean over IoU .5 to .95: the area is AP"),
    ):
        axis.set(xlim=(0, 1), ylim=(0, 1.02), title=title, xlabel="recall", ylabel="precision")
        if not order:
            write_instead(axis, "no labels")
            continue
        for number, cls in enumerate(order):
            text = f"{label(truth.names[cls])}  {values[:, cls].mean():.3f}"
            axis.plot(RECALLS, values[:, cls], **(line_style(number) | {"label": text} if number < NAMED else GREY))
        mean = values[:, order].mean(1)
        axis.plot(RECALLS, mean, color="black", linewidth=2.5, label=f"mean of all classes  {mean.mean():.3f}")
        if len(order) > NAMED:
            axis.plot([], [], label=f"{len(order) - NAMED} more classes", **GREY)
        axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save(figure, out)


def draw_confusion(truth: GroundTruth, detections: Detections, threshold: float, out: Path) -> None:
    """Count labels by the class that detections from a score on report; draw it with background."""
    from hotcoco.plot import confusion_matrix

    reported = detections[detections["score"] >= threshold]
    evaluation = hotcoco_evaluation(len(truth.image_ids), len(truth.names), *columns(truth, reported))
    names = [label(name) for name in truth.names]
    side = 4 + 0.35 * min(len(names), MOST_ROWS)
    figure, (axis,) = chart(side, side, layout="tight")
    confusion_matrix(evaluation.confusion_matrix(iou_thr=IOU) | {"cat_names": names}, normalize=False, ax=axis)
    shown = [text.get_text() for text in axis.get_xticklabels()][:-1]
    axis.set_xticklabels([*shown, "missed"])
    axis.set_yticklabels([*shown, "nothing there"])
    part = f", the {len(shown)} most confused of {len(names)} classes" if len(shown) < len(names) else ""
    axis.set(xlabel="reported class", ylabel="labelled class", title=f"boxes, score from {threshold:.2g}{part}")
    save(figure, out)
