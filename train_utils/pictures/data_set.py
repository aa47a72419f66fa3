"""Charts of a data set: how often classes occur and how large boxes are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from train_utils.pictures.charts import as_label

MOST_POINTS = 20_000  # of a scatter plot: more are slow and show nothing new
MOST_BARS = 100


def draw_classes(splits: dict[str, list[dict[str, Any]]], out: Path) -> None:
    """Draw the boxes per class as bars, a colour per split; ``splits`` list names and boxes."""
    by_split = {split: {item["name"]: item["boxes"] for item in classes} for split, classes in splits.items()}
    names = list(dict.fromkeys(name for classes in by_split.values() for name in classes))
    names.sort(key=lambda name: -sum(classes.get(name, 0) for classes in by_split.values()))
    names = names[:MOST_BARS]
    figure = Figure(figsize=(min(16, 4 + 0.2 * len(names)), 4.5), layout="constrained")
    axis = figure.subplots()
    width = 0.8 / len(by_split)
    for number, (split, classes) in enumerate(by_split.items()):
        places = np.arange(len(names)) + (number - (len(by_split) - 1) / 2) * width
        axis.bar(places, [classes.get(name, 0) for name in names], width, label=split)
    labels = [as_label(name) for name in names]
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
    figure = Figure(figsize=(7.5, 6.5), layout="constrained")
    axis = figure.subplots()
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
