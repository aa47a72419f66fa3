"""The curves of several runs over one another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from train_utils.pictures.style import chart, line_style, write_instead
from train_utils.report.groups import Group
from train_utils.scores.coco_eval import ABSENT

CURVES = ("AP", "AP50", "loss")


def draw_overlay(groups: Sequence[Group], out: Path) -> None:
    """Draw CURVES over the epochs, a line for each run in the colour of its setting."""
    figure, axes = chart(4.2 * len(CURVES), 3.6, len(CURVES))
    for axis, column in zip(axes, CURVES, strict=True):
        for number, group in enumerate(groups):
            name: str | None = group.letter
            for run in group.runs:
                points = [(row["epoch"], row[column]) for row in run.epochs if row.get(column, ABSENT) != ABSENT]
                if points:
                    marker = "." if len(points) < 30 else ""
                    axis.plot(*zip(*points, strict=True), label=name, marker=marker, alpha=0.8, **line_style(number))
                    name = None
        axis.set(title=column, xlabel="epoch")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)
        else:
            write_instead(axis, "no figures")
    figure.savefig(out)
