"""Pictures of a run: its curves, the first training batch, and detections beside the labels."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

import cv2
import matplotlib
import numpy as np

matplotlib.use("Agg")  # no display is needed
from matplotlib import pyplot as plt

from train_utils.drawing import draw_boxes
from train_utils.errors import TrainError

CURVE_GROUPS = (
    ("loss", ("loss", "loss_box", "loss_objectness", "loss_classification")),
    ("average precision", ("AP", "AP50", "AP75")),
    ("AP by object size", ("APs", "APm", "APl")),
    ("learning rate", ("lr",)),
)


def draw_curves(metrics_csv: Path, out: Path) -> None:
    """Draw the columns of a metrics.csv over the epochs into the picture ``out``; empty cells are left out."""
    with metrics_csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure, axes = plt.subplots(1, len(CURVE_GROUPS), figsize=(4.2 * len(CURVE_GROUPS), 3.4), layout="constrained")
    for axis, (title, columns) in zip(axes, CURVE_GROUPS, strict=True):
        for column in columns:
            points = [(float(r["epoch"]), float(r[column])) for r in rows if r.get(column) and float(r[column]) >= 0]
            if points:
                axis.plot(*zip(*points, strict=True), marker="." if len(points) < 60 else "", label=column)
        axis.set(title=title, xlabel="epoch")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def save_sheet(images: Sequence[np.ndarray], columns: int, out: Path, cell: int = 400) -> None:
    """Save RGB images side by side as one picture, each scaled into a square of ``cell`` pixels on grey.

    Raises TrainError where it cannot be written.
    """
    rows = -(-len(images) // columns)
    sheet = np.full((rows * cell, columns * cell, 3), 114, np.uint8)
    for i, image in enumerate(images):
        ratio = min(cell / image.shape[0], cell / image.shape[1])
        size = (max(1, int(image.shape[1] * ratio)), max(1, int(image.shape[0] * ratio)))
        small = cv2.resize(image, size, interpolation=cv2.INTER_AREA if ratio < 1 else cv2.INTER_LINEAR)
        y, x = i // columns * cell, i % columns * cell
        sheet[y : y + small.shape[0], x : x + small.shape[1]] = small
    if not cv2.imwrite(str(out), sheet[..., ::-1]):
        raise TrainError(f"cannot write the picture {out}. fix: free some space there, or choose another folder")


def draw_targets(images: np.ndarray, targets: np.ndarray, names: Sequence[str], out: Path, count: int = 16) -> None:
    """Save the first images of a training batch with their boxes.

    ``images`` uint8 (B, 3, H, W) RGB; ``targets`` (T, 6): image in the batch, class, cx, cy, w, h in pixels.
    """
    drawn = []
    for i, image in enumerate(images[:count]):
        rows = targets[targets[:, 0] == i]
        half = rows[:, 4:6] / 2
        boxes_xyxy = np.concatenate([rows[:, 2:4] - half, rows[:, 2:4] + half], axis=1)
        drawn.append(draw_boxes(image.transpose(1, 2, 0), boxes_xyxy, rows[:, 1], names))
    save_sheet(drawn, 4, out)


def draw_detections(
    pairs: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]],
    names: Sequence[str],
    out: Path,
    confidence: float = 0.3,
) -> None:
    """Save pictures in pairs: the labels on the left, detections above ``confidence`` on the right.

    Each pair is (image uint8 RGB, labels (n, 5) x1, y1, x2, y2, class, detections (m, 6) x1, y1, x2, y2, score, class).
    """
    drawn = []
    for image, labels, detections in pairs:
        shown = detections[detections[:, 4] > confidence]
        drawn.append(draw_boxes(image, labels[:, :4], labels[:, 4], names))
        drawn.append(draw_boxes(image, shown[:, :4], shown[:, 5], names, shown[:, 4]))
    if drawn:
        save_sheet(drawn, 4, out)
