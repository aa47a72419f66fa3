"""Charts of a data set: its classes, and the sizes and places of its boxes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from train_utils.pictures.style import COLORS, MAP, chart, label, line_style, save
from train_utils.scores.detections import GroundTruth

MOST_POINTS = 20_000  # of a scatter plot: more are slow and show nothing new
MOST_BARS = 100
MOST_LABEL_BARS = 80
AREA_EDGES = (32**2, 96**2)  # between COCO's small, medium and large boxes, in pixels


def draw_classes(splits: dict[str, list[dict[str, Any]]], out: Path) -> None:
    """Draw the boxes per class as bars, a colour per split; ``splits`` list names and boxes."""
    by_split = {split: {item["name"]: item["boxes"] for item in classes} for split, classes in splits.items()}
    names = list(dict.fromkeys(name for classes in by_split.values() for name in classes))
    names.sort(key=lambda name: -sum(classes.get(name, 0) for classes in by_split.values()))
    names = names[:MOST_BARS]
    figure, (axis,) = chart(min(16, 4 + 0.2 * len(names)), 4.5)
    width = 0.8 / len(by_split)
    for number, (split, classes) in enumerate(by_split.items()):
        places = np.arange(len(names)) + (number - (len(by_split) - 1) / 2) * width
        axis.bar(places, [classes.get(name, 0) for name in names], width, label=split)
    labels = [label(name) for name in names]
    axis.set_xticks(range(len(names)), labels, rotation=90 if len(names) > 10 else 0, fontsize=8)
    axis.set(ylabel="boxes", yscale="symlog")
    axis.legend()
    save(figure, out)


def draw_box_sizes(
    sizes: dict[str, np.ndarray], anchors: np.ndarray, strides: Sequence[int], image_size: int, out: Path
) -> None:
    """Draw the widths and heights (n, 2) of each split's boxes, anchors (k, 2) and strides.

    All are in pixels of the network's input.
    """
    figure, (axis,) = chart(7.5, 6.5)
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
    save(figure, out)


def draw_labels(truth: GroundTruth, title: str, out: Path) -> None:
    """Draw the boxes of a set without crowds: their classes, centres, shapes and areas."""
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    counted = ~truth.crowd.astype(bool)
    boxes, sizes = truth.boxes_xywh[counted], truth.sizes[truth.image_of_box[counted]][:, ::-1]
    counts = np.bincount(truth.classes[counted], minlength=len(truth.names))
    order = np.argsort(-counts, kind="stable")[:MOST_LABEL_BARS]
    more = len(truth.names) - len(order)
    figure = Figure(figsize=(14, 9), layout="constrained")
    axes = figure.subplot_mosaic([["bars"] * 3, ["centres", "shapes", "areas"]])
    bars = axes["bars"]
    places, many = range(len(order)), len(order) > 6
    drawn = bars.bar(places, counts[order], color=COLORS[0])
    bars.bar_label(drawn, padding=2, fontsize=7, rotation=90 * many)
    bars.set_xticks(places, [label(truth.names[cls]) for cls in order], fontsize=8, rotation=90 * many)
    bars.set(
        xlim=(-0.6, max(10, len(order)) - 0.4),
        ylabel="boxes",
        title=f"{title}: {len(truth.image_ids):,} images, {len(boxes):,} boxes"
        + f" ({more} more classes)" * (more > 0),
    )
    bars.margins(y=0.15)
    fractions = boxes / np.tile(sizes, 2)
    halves = np.linspace(0, 1, 51)
    for name, (x, y), axis_labels in (
        ("centres", (fractions[:, :2] + fractions[:, 2:] / 2).T, ("x, share of the width", "y, share of the height")),
        ("shapes", fractions[:, 2:].T, ("width, share of the image", "height, share of the image")),
    ):
        axis = axes[name]
        axis.hist2d(x.clip(0, 1), y.clip(0, 1), bins=[halves, halves], cmap=MAP, cmin=1, norm=PowerNorm(0.5, vmin=0))
        axis.set(title=f"{name} of the boxes", xlabel=axis_labels[0], ylabel=axis_labels[1], xlim=(0, 1), ylim=(0, 1))
        axis.set_box_aspect(1)
    axes["centres"].invert_yaxis()  # as in the picture
    area = np.sqrt(truth.areas[counted].clip(1))
    ends = area.min(initial=AREA_EDGES[0] ** 0.5), area.max(initial=AREA_EDGES[1] ** 0.5)
    axis = axes["areas"]
    axis.hist(area, bins=np.geomspace(*ends, 40).tolist(), color=COLORS[0])
    for number, (edge, name) in enumerate(zip(AREA_EDGES, ("medium from 32 px", "large from 96 px"), strict=True), 1):
        axis.axvline(edge**0.5, **line_style(number), label=name)
    axis.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.06), ncol=2)
    axis.set(xscale="log", xlabel="root of the area, pixels of the image", ylabel="boxes")
    axis.set_box_aspect(1)
    save(figure, out)
