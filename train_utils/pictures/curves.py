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
FRACTIONS = ("average precision", "AP by object size")  # groups with an axis from 0 to at most 1
SMOOTHED = ("loss", *FRACTIONS)  # the learning rate has no noise
MARKED_POINTS = 60  # a line of fewer points shows each
MOST_POINTS = 2000  # of a line: more are narrower than a pixel
LEAST_SMOOTHED = 15  # points; fewer are shown as they are
SPREAD = 0.03  # standard deviation of the smoothing, as a share of the points


def draw_curves(metrics_csv: Path, out: Path) -> None:
    """Draw the columns of a metrics.csv over the steps to the file ``out``; skip empty cells.

    A steps.csv beside it gives losses by step instead of by epoch. Long curves are smoothed, with
    the figures themselves behind them in pale. A vertical line marks the epoch with the best AP.
    """
    from matplotlib.ticker import MaxNLocator

    rows, steps_csv = _rows(metrics_csv), metrics_csv.with_name("steps.csv")
    tables = (rows, _rows(steps_csv) if steps_csv.exists() else [])
    figure, axes = chart(4.2 * len(CURVE_GROUPS), 4.4, len(CURVE_GROUPS))
    scored = [row for row in rows if row.get("AP") and float(row["AP"]) >= 0]
    best = max(scored, key=lambda row: float(row["AP"]), default=None)  # the first, as the checkpoint
    for axis, (title, columns) in zip(axes, CURVE_GROUPS, strict=True):
        for number, column in enumerate(columns):
            points = max((_points(table, column) for table in tables), key=len)
            if not len(points):
                continue
            steps, values = points.T
            style = line_style(number) | {"marker": "." if len(points) < MARKED_POINTS else "", "label": column}
            if title in SMOOTHED and len(points) >= LEAST_SMOOTHED:
                axis.plot(steps, values, color=style["color"], linewidth=0.8, alpha=0.35)
                values, style["marker"] = smooth(values), ""
            axis.plot(steps, values, **style)
        axis.set(
            title=title,
            xlabel="step" + (f" ({int(rows[-1]['step']) / int(rows[-1]['epoch']):g} per epoch)" if rows else ""),
        )
        axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
        if rows:  # the same for all, even for figures that are not there in every epoch
            axis.set_xlim(0, int(rows[-1]["step"]) * 1.02)
        if title in FRACTIONS:
            top = max((float(np.max(line.get_ydata())) for line in axis.lines), default=1)
            axis.set_ylim(0, 1 if top > 0.4 else max(0.1, 1.3 * top))
        if not axis.lines:
            write_instead(axis, "no figures")
            continue
        if best is not None:
            text = f"best: epoch {best['epoch']}" + (f", AP {float(best['AP']):.3f}" if title in FRACTIONS else "")
            axis.axvline(int(best["step"]), color="black", linestyle=":", linewidth=1, label=text)
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncol=2)
    save(figure, out)


def smooth(values: np.ndarray) -> np.ndarray:
    """The mean of the neighbours of each of the values (n,), weighted by a Gaussian.

    Unlike a running average it does not lag; at the ends it takes what neighbours there are.
    """
    spread = max(1.0, SPREAD * len(values))
    away = np.subtract.outer(np.arange(len(values)), np.arange(len(values))) / spread
    weights = np.exp(-(away**2) / 2)
    return np.asarray(weights @ values / weights.sum(1))


def _rows(table: Path) -> list[dict[str, str]]:
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def _points(rows: list[dict[str, str]], column: str) -> np.ndarray:
    """Step and value (n, 2) of a column; more than MOST_POINTS become means of neighbours."""
    points = [(float(row["step"]), float(row[column])) for row in rows if row.get(column) and float(row[column]) >= 0]
    blocks = np.array_split(np.array(points).reshape(-1, 2), min(MOST_POINTS, max(1, len(points))))
    return np.array([block.mean(0) for block in blocks if len(block)]).reshape(-1, 2)
