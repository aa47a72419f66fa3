"""Charts of one evaluation: precision and recall, AP, confusions, calibration, kinds of errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from train_utils.pictures.style import (
    COLORS,
    MAP,
    NAMED,
    chart,
    fraction_axis,
    label,
    legend_beside,
    line_style,
    save,
    write_instead,
)
from train_utils.scores.operating_points import ClassCurve

RECALLS = np.linspace(0, 1, 101)  # pycocotools' sample of the recalls
ALL: dict[str, Any] = {"color": "black", "linewidth": 2.5, "zorder": 3}
GREY: dict[str, Any] = {"color": "0.8", "linewidth": 0.8, "zorder": 1}
NUMBERED = 25  # a confusion matrix of more classes has no numbers in its cells
MOST_ROWS = 80  # classes of a matrix or bars, those with most boxes
SIZES = (("APs", "small", "v"), ("APm", "medium", "o"), ("APl", "large", "s"))
ERROR_KINDS = {  # TIDE's names
    "Cls": "right place, wrong class",
    "Loc": "right class, poor overlap",
    "Both": "wrong class, poor overlap",
    "Dupe": "found twice",
    "Bkg": "nothing there",
    "Miss": "missed",
}


def draw_precision_recall(precision: np.ndarray, boxes: Sequence[int], names: Sequence[str], out: Path) -> None:
    """Draw pycocotools' precision (IoU thresholds, 101 recalls, K) over recall.

    ``boxes`` counts the labels of each class. The mean height of a line is the AP in its legend.
    """
    figure, axes = chart(14, 4.6, 2)
    order = [cls for cls in np.argsort(-np.asarray(boxes), kind="stable") if precision[0, 0, cls] > -1]
    shares = (
        (precision[0], "IoU .5: the area is AP50"),
        (precision.mean(0), "mean over IoU .5 to .95: the area is AP"),
    )
    for axis, (values, title) in zip(axes, shares, strict=True):
        for number, cls in enumerate(order):
            text = f"{label(names[cls])}  {values[:, cls].mean():.3f}"
            style = line_style(number) | {"label": text} if number < NAMED else GREY
            axis.plot(RECALLS, values[:, cls], **style)
        fraction_axis(axis, title=title, xlabel="recall", ylabel="precision")
        if order:
            mean = values[:, order].mean(1)
            axis.plot(RECALLS, mean, label=f"mean of all classes  {mean.mean():.3f}", **ALL)
            legend_beside(axis, max(0, len(order) - NAMED))
        else:
            write_instead(axis, "no labels")
    save(figure, out)


def draw_confidence(
    curves: Sequence[ClassCurve], pooled: ClassCurve, threshold: float, names: Sequence[str], out: Path
) -> None:
    """Draw precision, recall and F1 at IoU .5 over the score from which detections are reported."""
    figure, axes = chart(16, 4.6, 3)
    pairs = sorted(zip(curves, names, strict=True), key=lambda pair: -pair[0].boxes)
    shown = [(curve, name) for curve, name in pairs if curve.thresholds.size]
    for axis, figure_name in zip(axes, ("precision", "recall", "F1"), strict=True):
        for number, (curve, name) in enumerate(shown):
            style = line_style(number) | {"label": label(name)} if number < NAMED else GREY
            axis.plot(curve.thresholds, getattr(curve, figure_name.lower()), drawstyle="steps-post", **style)
        fraction_axis(
            axis, title=f"{figure_name} at IoU .5", xlabel="score from which boxes are reported", ylabel=figure_name
        )
        if shown:
            values = getattr(pooled, figure_name.lower())
            axis.plot(pooled.thresholds, values, drawstyle="steps-post", label="all boxes together", **ALL)
            axis.axvline(threshold, color="black", linestyle=":", label=f"best F1 of all: {threshold:.2g}")
            axis.set_xlim(0, max(1, float(pooled.thresholds[0])))
        else:
            write_instead(axis, "no detections")
    if shown:
        legend_beside(axes[-1], max(0, len(shown) - NAMED))
    save(figure, out)


def draw_confusion(matrix: np.ndarray, names: Sequence[str], threshold: float, out: Path) -> None:
    """Draw a matrix (K + 1, K + 1), labels by reported classes, the last of each is background.

    Whole numbers are counts; others are shares of a row.
    """
    from matplotlib.colors import LogNorm, Normalize

    kept = np.sort(np.argsort(-matrix[:-1].sum(1), kind="stable")[:MOST_ROWS])
    places = np.append(kept, len(names))
    values, counts = matrix[np.ix_(places, places)], np.issubdtype(matrix.dtype, np.integer)
    side = float(np.clip(2.5 + 0.38 * len(places), 5, 15))
    figure, (axis,) = chart(side + 1.5, side)
    norm = LogNorm(0.5, max(2, values.max())) if counts else Normalize(0, 1)
    image = axis.imshow(np.ma.masked_equal(values, 0), cmap=MAP, norm=norm)
    figure.colorbar(image, ax=axis, shrink=0.7, label="boxes" if counts else "share of the row")
    texts = [label(names[cls]) for cls in kept]
    size = 9 if len(places) <= NUMBERED else 6
    axis.set_xticks(range(len(places)), [*texts, "missed"], rotation=90, fontsize=size)
    axis.set_yticks(range(len(places)), [*texts, "nothing there"], fontsize=size)
    left_out = f", {len(names) - len(kept)} rarer classes left out" if len(kept) < len(names) else ""
    kind = "boxes" if counts else "shares of each row"
    axis.set(xlabel="reported class", ylabel="labelled class", title=f"{kind}, score from {threshold:.2g}{left_out}")
    if len(places) <= NUMBERED + 1:
        for (row, column), value in np.ndenumerate(values):
            if value:
                ink = "white" if norm(value) > 0.55 else "black"
                text = f"{value}" if counts else f"{value:.2f}"
                axis.text(column, row, text, ha="center", va="center", color=ink, fontsize=8)
    save(figure, out)


def draw_average_precision(
    figures: Mapping[str, float], per_class: Mapping[str, Mapping[str, float]], out: Path
) -> None:
    """Draw the AP and AP50 of each class as bars, best first, and its AP by size of the boxes."""
    present = sorted((name for name, row in per_class.items() if row["AP"] >= 0), key=lambda n: -per_class[n]["AP"])
    left_out = len(present) - MOST_ROWS
    most = sorted(present, key=lambda name: -per_class[name]["boxes"])[:MOST_ROWS]
    rows = [("all classes", figures), *((label(name), per_class[name]) for name in present if name in most)]
    figure, (left, right) = chart(11, max(2.6, 1.4 + 0.2 * len(rows)), 2, sharey=True)
    places = np.arange(len(rows))
    for column, height, color in (("AP50", 0.8, COLORS[5]), ("AP", 0.45, COLORS[0])):
        left.barh(places, [max(0.0, row[column]) for _, row in rows], height, color=color, label=column)
    for number, (column, size, marker) in enumerate(SIZES):
        points = [(row[column], place) for place, (_, row) in enumerate(rows) if row[column] >= 0]
        right.plot(*zip(*points, strict=True) if points else ([], []), marker, color=COLORS[number], label=size)
    left.set_yticks(places, [name for name, _ in rows], fontsize=8)
    left.set(
        ylim=(len(rows) - 0.4, -0.6), title="AP" + (f", {left_out} rarer classes left out" if left_out > 0 else "")
    )
    right.set(title="AP by size of the box: small < 32² px, large > 96² px")
    for axis in (left, right):
        axis.set_xlim(0, 1)
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
        axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    save(figure, out)


def draw_calibration(calibration: Mapping[str, Any] | None, out: Path) -> None:
    """Draw the share of right detections over their score, and how many there are."""
    bins = [row for row in calibration["bins"] if row["count"]] if calibration is not None else []
    figure, (left, right) = chart(10, 4.4, 2)
    left.plot([0, 1], [0, 1], color="grey", linestyle="--", label="scores that are right as often as they say")
    if calibration is not None and bins:
        points = np.array([(row["avg_confidence"], row["avg_accuracy"]) for row in bins])
        text = f"these scores: off by {calibration['ece']:.3f} on average"
        left.plot(*points.T, "o-", color=COLORS[0], label=text)
    else:
        write_instead(right, "no detections" if calibration is not None else "scores outside 0 to 1")
    fraction_axis(left, title="calibration at IoU .5", xlabel="mean score", ylabel="share that is right")
    left.legend(fontsize=8)
    middles = [(row["bin_lower"] + row["bin_upper"]) / 2 for row in bins]
    right.bar(middles, [row["count"] for row in bins], 0.09, color=COLORS[0])
    right.set(title="detections by score", xlabel="score", ylabel="detections", yscale="symlog", xlim=(0, 1))
    right.grid(axis="y", alpha=0.3)
    save(figure, out)


def draw_error_kinds(tide: Mapping[str, Any], out: Path) -> None:
    """Draw the AP50 that each kind of error costs, with the number of such errors."""
    figure, (axis,) = chart(8, 3.2)
    values = [tide["delta_ap"][kind] for kind in ERROR_KINDS]
    bars = axis.barh(list(ERROR_KINDS.values()), values, color=COLORS[0])
    texts = [f"{value:.3f}  ({tide['counts'][kind]:,})" for kind, value in zip(ERROR_KINDS, values, strict=True)]
    axis.bar_label(bars, texts, padding=4, fontsize=8)
    axis.set(
        title=f"AP50 that each kind of error costs, of {tide['ap_base']:.3f}",
        xlabel="AP50 gained without them (errors)",
    )
    axis.set_xlim(0, max(0.01, 1.3 * max(values)))
    axis.invert_yaxis()
    axis.grid(axis="x", alpha=0.3)
    save(figure, out)
