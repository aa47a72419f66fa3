"""Charts: a training's curves, precision and recall of an evaluation, classes and boxes of data."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from train_utils.scores.operating_points import ClassCurve

if TYPE_CHECKING:  # matplotlib takes longer to import than to draw, so only charts pay for it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVE_GROUPS = (
    ("loss", ("loss", "loss_box", "loss_objectness", "loss_classification")),
    ("average precision", ("AP", "AP50", "AP75")),
    ("AP by object size", ("APs", "APm", "APl")),
    ("learning rate", ("lr",)),
)
FRACTIONS = ("average precision", "AP by object size")  # groups with an axis from 0 to 1
MARKED_POINTS = 60  # a line of fewer points shows each
NAMED = 10  # classes with a line of their own in the legend
MOST_POINTS = 20_000  # of a scatter plot: more are slow and show nothing new
MOST_BARS = 100


def draw_curves(metrics_csv: Path, out: Path) -> None:
    """Draw the columns of a metrics.csv over the epochs to the file ``out``; skip empty cells."""
    from matplotlib.ticker import MaxNLocator

    with metrics_csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    epochs = [int(row["epoch"]) for row in rows]
    figure, axes = _chart(4.2 * len(CURVE_GROUPS), 3.4, len(CURVE_GROUPS))
    for axis, (title, columns) in zip(axes, CURVE_GROUPS, strict=True):
        for column in columns:
            points = [(int(r["epoch"]), float(r[column])) for r in rows if r.get(column) and float(r[column]) >= 0]
            if points:
                axis.plot(*zip(*points, strict=True), marker="." if len(points) < MARKED_POINTS else "", label=column)
        axis.set(title=title, xlabel="epoch")
        axis.grid(alpha=0.3)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        if epochs:  # the same for all, even for figures that are not there in every epoch
            axis.set_xlim(min(epochs) - 0.5, max(epochs) + 0.5)
        if title in FRACTIONS:
            axis.set_ylim(0, 1)
        if axis.lines:
            axis.legend(fontsize=8)
        else:
            _write_instead(axis, "no figures")
    figure.savefig(out, dpi=110)


def draw_class_curves(curves: Sequence[ClassCurve], names: Sequence[str], out: Path) -> None:
    """Draw precision over recall, and F1 over the score threshold, at IoU .5, to the file ``out``.

    Each class with detections has a line; the legend names those with most boxes. A dot marks the
    best F1.
    """
    figure, (left, right) = _chart(11, 4.2, 2)
    shown = [(curve, name) for curve, name in zip(curves, names, strict=True) if curve.thresholds.size]
    for number, (curve, name) in enumerate(sorted(shown, key=lambda pair: -pair[0].boxes)):
        style: dict[str, Any] = {"label": _label(name)} if number < NAMED else {"color": "0.8", "zorder": 1}
        (line,) = left.plot(curve.recall, curve.precision, linewidth=1, **style)
        right.plot(curve.thresholds, curve.f1, linewidth=1, **style)
        if (best := curve.best()) is not None and number < NAMED:
            right.plot(best["threshold"], best["f1"], "o", color=line.get_color(), markersize=4)
    left.set(title="precision and recall at IoU .5", xlabel="recall", ylabel="precision")
    right.set(title="F1 at IoU .5", xlabel="score threshold", ylabel="F1")
    for axis in (left, right):
        axis.set(xlim=(0, 1), ylim=(0, 1.02), xticks=np.linspace(0, 1, 6))
        axis.grid(alpha=0.3)
        if not shown:
            _write_instead(axis, "no detections")
    if shown:
        left.legend(fontsize=8)
    figure.savefig(out, dpi=110)


def draw_classes(splits: dict[str, list[dict[str, Any]]], out: Path) -> None:
    """Draw the boxes per class as bars, a colour per split; ``splits`` list names and boxes."""
    by_split = {split: {item["name"]: item["boxes"] for item in classes} for split, classes in splits.items()}
    names = list(dict.fromkeys(name for classes in by_split.values() for name in classes))
    names.sort(key=lambda name: -sum(classes.get(name, 0) for classes in by_split.values()))
    names = names[:MOST_BARS]
    figure, (axis,) = _chart(min(16, 4 + 0.2 * len(names)), 4.5)
    width = 0.8 / len(by_split)
    for number, (split, classes) in enumerate(by_split.items()):
        places = np.arange(len(names)) + (number - (len(by_split) - 1) / 2) * width
        axis.bar(places, [classes.get(name, 0) for name in names], width, label=split)
    labels = [_label(name) for name in names]
    axis.set_xticks(range(len(names)), labels, rotation=90 if len(names) > 10 else 0, fontsize=8)
    axis.set(ylabel="boxes", yscale="symlog")
    axis.legend()
    figure.savefig(out, dpi=100)


def draw_box_sizes(
    sizes: dict[str, np.ndarray], anchors: np.ndarray, strides: Sequence[int], image_size: int, out: Path
) -> None:
    """Draw the widths and heights (n, 2) of each split's boxes, anchors (k, 2) and strides.

    All are in pixels of the network's input.
    """
    figure, (axis,) = _chart(7.5, 6.5)
    for split, values in sizes.items():
        shown = values[:: max(1, -(-len(values) // MOST_POINTS))]
        axis.scatter(shown[:, 0], shown[:, 1], s=3, alpha=0.3, label=split)
    axis.scatter(anchors[:, 0], anchors[:, 1], marker="+", s=120, linewidths=2, color="black", label="anchors")
    for stride in strides:
        axis.plot([0, stride, stride], [stride, stride, 0], color="grey", linewidth=0.8, linestyle="--")
        axis.annotate(f"stride {stride}", (stride, stride), fontsize=8, color="grey")
    axis.set(
        xscale="log", yscale="log", xlabel="width, pixels", ylabel="height, pixels",
        title=f"box sizes in images of {image_size} pixels",
    )  # fmt: skip
    axis.legend()
    figure.savefig(out, dpi=100)


def _chart(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of that size in inches, with its axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def _label(name: str) -> str:
    """Escape a class name: in matplotlib "$" starts a formula, and a leading "_" hides a label."""
    shown = name[:30].replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def _write_instead(axis: Axes, text: str) -> None:
    """Write ``text`` in the middle of an empty chart."""
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", color="grey")
