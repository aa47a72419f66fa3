"""The curves of a training: losses, average precision and learning rate over its steps."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from train_utils.pictures.style import chart, line_style, save, write_instead

CURVE_GROUPS = (
    ("loss", ("loss", "loss_box", "loss_objectness", "loss_classification")),
    ("average precision", ("AP", "AP50", "AP75")),
    ("AP by object size", ("APs", "APm", "APl")),
    ("learning rate", ("lr",)),
)
FRACTIONS = ("average precision", "AP by object size")  # groups with an axis from 0 to 1
SMOOTHED = ("loss", *FRACTIONS)  # the learning rate has no noise
MARKED_POINTS = 60  # a line of fewer points shows each
LEAST_SMOOTHED = 15  # points; fewer are shown as they are
SPREAD = 0.03  # standard deviation of the smoothing, as a share of the points


def draw_curves(metrics_csv: Path, out: Path) -> None:
    """Draw the columns of a metrics.csv over the steps to the file ``out``; skip empty cells.

    Long curves are smoothed, with the figures themselves behind them in pale. A vertical line marks
    the epoch with the best AP.
    """
    with metrics_csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure, axes = chart(4.2 * len(CURVE_GROUPS), 3.6, len(CURVE_GROUPS))
    scored = [row for row in rows if row.get("AP") and float(row["AP"]) >= 0]
    best = max(scored, key=lambda row: float(row["AP"]), default=None)  # the first, as the checkpoint
    for axis, (title, columns) in zip(axes, CURVE_GROUPS, strict=True):
        for number, column in enumerate(columns):
            points = [(int(r["step"]), float(r[column])) for r in rows if r.get(column) and float(r[column]) >= 0]
            if not points:
                continue
            steps, values = np.array(points).T
            style = line_style(number) | {"marker": "." if len(points) < MARKED_POINTS else "", "label": column}
            if title in SMOOTHED and len(points) >= LEAST_SMOOTHED:
                axis.plot(steps, values, color=style["color"], linewidth=0.8, alpha=0.35)
                values, style["marker"] = smooth(values), ""
            axis.plot(steps, values, **style)
        axis.set(title=title, xlabel="step" + (f" ({_steps_per_epoch(rows[-1]):g} per epoch)" if rows else ""))
        axis.grid(alpha=0.3)
        if rows:  # the same for all, even for figures that are not there in every epoch
            axis.set_xlim(0, int(rows[-1]["step"]) * 1.02)
        if title in FRACTIONS:
            axis.set_ylim(0, 1)
        if not axis.lines:
            write_instead(axis, "no figures")
            continue
        if best is not None:
            text = f"best: epoch {best['epoch']}" + (f", AP {float(best['AP']):.3f}" if title in FRACTIONS else "")
            axis.axvline(int(best["step"]), color="black", linestyle=":", linewidth=1, label=text)
        axis.legend(fontsize=8)
    save(figure, out)


def smooth(values: np.ndarray) -> np.ndarray:
    """The mean of the neighbours of each of the values (n,), weighted by a Gaussian.

    Unlike a running average it does not lag; at the ends it takes what neighbours there are.
    """
    spread = max(1.0, SPREAD * len(values))
    away = np.subtract.outer(np.arange(len(values)), np.arange(len(values))) / spread
    weights = np.exp(-(away**2) / 2)
    return np.asarray(weights @ values / weights.sum(1))


def _steps_per_epoch(row: dict[str, str]) -> float:
    return int(row["step"]) / int(row["epoch"])
