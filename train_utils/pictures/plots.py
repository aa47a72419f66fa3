"""Pictures of a run: its curves, its first training batch, and detections beside labels."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from train_utils.pictures.sheets import Cell, Group, save_sheet

CURVE_GROUPS = (
    ("loss", ("loss", "loss_box", "loss_objectness", "loss_classification")),
    ("average precision", ("AP", "AP50", "AP75")),
    ("AP by object size", ("APs", "APm", "APl")),
    ("learning rate", ("lr",)),
)
FRACTIONS = ("average precision", "AP by object size")  # groups with an axis from 0 to 1


def draw_curves(metrics_csv: Path, out: Path) -> None:
    """Draw the columns of a metrics.csv over the epochs to the file ``out``; skip empty cells."""
    with metrics_csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    epochs = [int(row["epoch"]) for row in rows]
    figure = Figure(figsize=(4.2 * len(CURVE_GROUPS), 3.4), layout="constrained")
    for axis, (title, columns) in zip(figure.subplots(1, len(CURVE_GROUPS)), CURVE_GROUPS, strict=True):
        for column in columns:
            points = [(int(r["epoch"]), float(r[column])) for r in rows if r.get(column) and float(r[column]) >= 0]
            if points:
                axis.plot(*zip(*points, strict=True), marker="." if len(points) < 60 else "", label=column)
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
            axis.text(0.5, 0.5, "no figures", transform=axis.transAxes, ha="center", color="grey")
    figure.savefig(out, dpi=110)


def draw_targets(images: np.ndarray, targets: np.ndarray, names: Sequence[str], out: Path, count: int = 16) -> None:
    """Save the first images of a training batch with their boxes.

    ``images`` is uint8 RGB (B, 3, H, W); ``targets`` (T, 6) are image in the batch, class, cx, cy,
    w, h in pixels.
    """
    groups = []
    for i, image in enumerate(images[:count]):
        rows = targets[targets[:, 0] == i]
        half = rows[:, 4:6] / 2
        boxes_xyxy = np.concatenate([rows[:, 2:4] - half, rows[:, 2:4] + half], axis=1)
        groups.append(Group([Cell(image.transpose(1, 2, 0), boxes_xyxy, rows[:, 1], names, empty="no box")]))
    save_sheet(groups, 4, out)


def draw_detections(
    pairs: Iterable[tuple[str, np.ndarray, np.ndarray, np.ndarray]],
    names: Sequence[str],
    out: Path,
    confidence: float = 0.3,
) -> None:
    """Save pairs of pictures: labels on the left, detections above ``confidence`` on the right.

    Each pair is (file name, image uint8 RGB, labels (n, 5) x1, y1, x2, y2, class, detections (m, 6)
    x1, y1, x2, y2, score, class).
    """
    groups = []
    for name, image, labels, detections in pairs:
        shown = detections[detections[:, 4] > confidence]
        above = f"above {confidence:g}"
        left = Cell(image, labels[:, :4], labels[:, 4], names, None, f"labels: {len(labels)}", "no label")
        right = Cell(
            image, shown[:, :4], shown[:, 5], names, shown[:, 4],
            title=f"detections {above}: {len(shown)}", empty=f"no detection {above}",
        )  # fmt: skip
        groups.append(Group([left, right], name))
    if groups:
        save_sheet(groups, 2, out)
