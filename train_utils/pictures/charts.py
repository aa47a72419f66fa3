"""A chart of the precision, recall and F1 of all classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from train_utils.scores.operating_points import ClassCurve

NAMED = 10  # classes with a line of their own in the legend


def as_label(name: str) -> str:
    """Escape a class name: in matplotlib "$" starts a formula, and a leading "_" hides a label."""
    shown = name[:30].replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def draw_class_curves(curves: Sequence[ClassCurve], names: Sequence[str], out: Path) -> None:
    """Draw precision over recall, and F1 over the score threshold, at IoU .5, to the file ``out``.

    Each class with detections has a line; the legend names those with most boxes. A dot marks the
    best F1.
    """
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    shown = [(curve, name) for curve, name in zip(curves, names, strict=True) if curve.thresholds.size]
    for number, (curve, name) in enumerate(sorted(shown, key=lambda pair: -pair[0].boxes)):
        style = {"label": as_label(name)} if number < NAMED else {"color": "0.8", "zorder": 1}
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
            axis.text(0.5, 0.5, "no detections", transform=axis.transAxes, ha="center", color="grey")
    if shown:
        left.legend(fontsize=8)
    figure.savefig(out, dpi=110)
