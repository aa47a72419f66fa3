"""Charts of one evaluation: precision and recall, AP, confusions, calibration, kinds of errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from train_utils.pictures.style import (
    BESIDE,
    COLORS,
    NAMED,
    chart,
    fraction_axis,
    label,
    line_style,
    save,
    write_instead,
)
from train_utils.scores.coco_eval import CocoResult
from train_utils.scores.diagnosis import Diagnosis

if TYPE_CHECKING:  # matplotlib takes longer to import than to draw, so only charts pay for it
    from matplotlib.axes import Axes

RECALLS = np.linspace(0, 1, 101)  # pycocotools' sample of the recalls
ALL: dict[str, Any] = {"color": "black", "linewidth": 2.5, "zorder": 3}
GREY: dict[str, Any] = {"color": "0.8", "linewidth": 0.8, "zorder": 1}
MOST_BARS = 80  # classes, those with most boxes
MOST_ROWS = 30  # classes of a whole confusion matrix; of more, hotcoco draws the 25 most confused
SIZES = (("APs", "small", "v"), ("APm", "medium", "o"), ("APl", "large", "s"))
ERROR_KINDS = {  # TIDE's names
    "Cls": "right place, wrong class",
    "Loc": "right class, poor overlap",
    "Both": "wrong class, poor overlap",
    "Dupe": "found twice",
    "Bkg": "nothing there",
    "Miss": "missed",
}

Line = tuple[np.ndarray, np.ndarray, str]  # x, y and what the legend says


def draw_precision_recall(found: Diagnosis, out: Path) -> None:
    """Draw pycocotools' precision over recall; the mean height of a line is its AP."""
    figure, axes = chart(14, 4.6, 2)
    boxes = [curve.boxes for curve in found.curves]
    order = [cls for cls in np.argsort(boxes)[::-1] if found.precision[0, 0, cls] > -1]
    for axis, values, title in (
        (axes[0], found.precision[0], "IoU .5: the area is AP50"),
        (axes[1], found.precision.mean(0), "mean over IoU .5 to .95: the area is AP"),
    ):
        fraction_axis(axis, title=title, xlabel="recall", ylabel="precision")
        if not order:
            write_instead(axis, "no labels")
            continue
        heights = [(values[:, cls], found.truth.names[cls]) for cls in order]
        mean = values[:, order].mean(1)
        lines = [(RECALLS, height, f"{label(name)}  {height.mean():.3f}") for height, name in heights]
        _draw_lines(axis, lines, (RECALLS, mean, f"mean of all classes  {mean.mean():.3f}"))
        axis.legend(**BESIDE)
    save(figure, out)


def draw_confidence(found: Diagnosis, out: Path) -> None:
    """Draw precision, recall and F1 at IoU .5 over the score from which detections are reported."""
    figure, axes = chart(16, 4.6, 3)
    pairs = sorted(zip(found.curves, found.truth.names, strict=True), key=lambda pair: -pair[0].boxes)
    shown = [(curve, label(name)) for curve, name in pairs if curve.thresholds.size]
    for axis, name in zip(axes, ("precision", "recall", "F1"), strict=True):
        fraction_axis(axis, title=f"{name} at IoU .5", xlabel="score from which boxes are reported", ylabel=name)
        if not shown:
            write_instead(axis, "no detections")
            continue
        key, pooled = name.lower(), found.pooled
        lines = [(curve.thresholds, getattr(curve, key), text) for curve, text in shown]
        together = pooled.thresholds, getattr(pooled, key), "all boxes together"
        _draw_lines(axis, lines, together, drawstyle="steps-post")
        axis.axvline(found.threshold, color="black", linestyle=":", label=f"best F1 of all: {found.threshold:.2g}")
        axis.set_xlim(0, max(1, float(pooled.thresholds[0])))
    if shown:
        axes[-1].legend(**BESIDE)
    save(figure, out)


def _draw_lines(axis: Axes, classes: Sequence[Line], together: Line, **more: Any) -> None:
    """Draw a line for each class, of which the first are in colours, and one for all in black."""
    for number, (x, y, text) in enumerate(classes):
        axis.plot(x, y, **(line_style(number) | {"label": text} if number < NAMED else GREY), **more)
    axis.plot(together[0], together[1], label=together[2], **ALL, **more)
    if len(classes) > NAMED:
        axis.plot([], [], label=f"{len(classes) - NAMED} more classes", **GREY)


def draw_confusion(found: Diagnosis, normalize: bool, out: Path) -> None:
    """Draw labels by reported classes with background: counts, or shares of a row."""
    from hotcoco.plot import confusion_matrix

    names = [label(name) for name in found.truth.names]
    side = 4 + 0.35 * min(len(names), MOST_ROWS)
    figure, (axis,) = chart(side, side, layout="tight")
    confusion_matrix(found.confusion | {"cat_names": names}, normalize=normalize, ax=axis)
    shown = [text.get_text() for text in axis.get_xticklabels()][:-1]
    axis.set_xticklabels([*shown, "missed"])
    axis.set_yticklabels([*shown, "nothing there"])
    kind = "shares of each row" if normalize else "boxes"
    part = f", the {len(shown)} most confused of {len(names)} classes" if len(shown) < len(names) else ""
    axis.set(xlabel="reported class", ylabel="labelled class", title=f"{kind}, score from {found.threshold:.2g}{part}")
    save(figure, out)


def draw_average_precision(scores: CocoResult, out: Path) -> None:
    """Draw the AP and AP50 of each class as bars, best first, and its AP by size of the boxes."""
    present = [(label(name), row) for name, row in scores.per_class.items() if row["AP"] >= 0]
    most = sorted(present, key=lambda pair: -pair[1]["boxes"])[:MOST_BARS]
    rows = [("all classes", scores.figures), *sorted(most, key=lambda pair: -pair[1]["AP"])]
    figure, (left, right) = chart(11, max(2.6, 1.4 + 0.2 * len(rows)), 2, sharey=True)
    for column, height, color in (("AP50", 0.8, COLORS[3]), ("AP", 0.45, COLORS[0])):
        left.barh(range(len(rows)), [max(0, row[column]) for _, row in rows], height, color=color, label=column)
    for number, (column, size, marker) in enumerate(SIZES):
        points = [(row[column], place) for place, (_, row) in enumerate(rows) if row[column] >= 0]
        right.plot([x for x, _ in points], [y for _, y in points], marker, color=COLORS[number], label=size)
    left.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    left_out = len(present) - len(most)
    left.set(ylim=(len(rows) - 0.4, -0.6), title="AP" + f", {left_out} rarer classes left out" * (left_out > 0))
    right.set(title="AP by size of the box: small < 32² px, large > 96² px")
    for axis in (left, right):
        axis.set_xlim(0, 1)
        axis.legend(**BESIDE)
    save(figure, out)


def draw_calibration(found: Diagnosis, out: Path) -> None:
    """Draw how often detections of a score are right."""
    from hotcoco.plot import reliability_diagram

    figure, (axis,) = chart(6, 6)
    axis.set_prop_cycle(color=[COLORS[3]])  # hotcoco's blue is as dark as the red of the gap on it
    if found.calibration is not None:
        reliability_diagram(found.calibration, ax=axis)
    else:
        write_instead(axis, "scores outside 0 to 1")
    save(figure, out)


def draw_error_kinds(found: Diagnosis, out: Path) -> None:
    """Draw the AP50 that each kind of error costs."""
    figure, (axis,) = chart(8, 3.2)
    costs = [found.tide["delta_ap"][kind] for kind in ERROR_KINDS]
    bars = axis.barh(list(ERROR_KINDS.values()), costs, color=COLORS[0])
    axis.bar_label(
        bars,
        [f"{cost:.3f}  ({found.tide['counts'][kind]:,})" for kind, cost in zip(ERROR_KINDS, costs, strict=True)],
        padding=4,
    )
    axis.set(
        title=f"AP50 that each kind of error costs, of {found.tide['ap_base']:.3f}",
        xlabel="AP50 gained without them (errors)",
        xlim=(0, max(0.01, 1.3 * max(costs))),
    )
    axis.invert_yaxis()
    save(figure, out)
