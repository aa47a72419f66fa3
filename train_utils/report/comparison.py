"""A comparison of runs on the terminal and as ``compare.html``."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from train_utils.pictures.style import chart, line_style
from train_utils.report.gains import Gain
from train_utils.report.groups import SEED, Group, differences
from train_utils.report.page import data_url, figure, shown, write_page
from train_utils.report.run_files import Run
from train_utils.scores.coco_eval import ABSENT, FIGURES

TITLES = ("setting", "runs", "AP mean", "spread", "AP50", "AP75", "best epochs")
FOLDER_TITLES = ("setting", "seed", "folder")
CURVES = ("AP", "AP50", "loss")
MORE_SEEDS = "A setting with one run only may be lucky in its seed: repeat it with train.seed=1,2 (train.py -m)."
ONE_GROUP = "All runs have the same setting and differ in train.seed only: their spread is what luck does."


def contents(groups: Sequence[Group], gains: Sequence[Gain], resamples: int) -> dict[str, Any]:
    """What terminal and page show: tables by row, sentences, and whether each gain is real."""
    images = len(groups[0].best[0].truth.image_ids)
    notes = [f"Paired bootstrap: {resamples:,} resamples of the {images:,} validation images, the same for both sides."]
    notes += [MORE_SEEDS] * any(len(group.runs) == 1 for group in groups)
    runs = [(group.letter, run, best) for group in groups for run, best in zip(group.runs, group.best, strict=True)]
    return {
        "titles": TITLES,
        "settings": [row_of(group) for group in groups],
        "figure_titles": ("setting", "seed", *FIGURES),
        "figures": [
            (letter, seed_of(run), *(figure(best.scores.figures[name]) for name in FIGURES))
            for letter, run, best in runs
        ],
        "folder_titles": FOLDER_TITLES,
        "folders": [(letter, seed_of(run), str(run.folder)) for letter, run, _ in runs],
        "option_titles": ("option", *(group.letter for group in groups)),
        "options": [(key, *map(shown, values)) for key, values in differences(groups)],
        "verdicts": [
            (f"{group.letter} against {groups[0].letter}: {gain.sentence()}.", gain.is_real)
            for group, gain in zip(groups[1:], gains, strict=True)
        ],
        "notes": notes if gains else [ONE_GROUP],
    }


def row_of(group: Group) -> tuple[str, ...]:
    """The cells of a setting below TITLES."""
    figures = group.mean("AP"), group.spread(), group.mean("AP50"), group.mean("AP75")
    epochs = (f"{run.best['epoch']:.0f}" if run.best else "-" for run in group.runs)
    return group.letter, str(len(group.runs)), *map(figure, figures), ", ".join(epochs)


def seed_of(run: Run) -> str:
    """The seed of a run."""
    return shown(run.options.get(SEED, "-"))


def print_comparison(found: dict[str, Any]) -> None:
    """Print ``contents``."""
    tables = (TITLES, found["settings"]), (found["option_titles"], found["options"]), (FOLDER_TITLES, found["folders"])
    for titles, rows in tables:
        if rows:
            widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
            for row in (titles, *rows):
                print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
            print()
    print("\n\n".join([*(sentence for sentence, _ in found["verdicts"]), *found["notes"]]))


def write_comparison(out: Path, groups: Sequence[Group], found: dict[str, Any]) -> None:
    """Write ``contents``, with the curves of all runs, as the page ``out``. Raises TrainError."""
    title = "Comparison of " + ", ".join(group.letter for group in groups)
    write_page("compare", out, title=title, curves=data_url(curves(groups), "curves.svg"), **found)


def curves(groups: Sequence[Group]) -> bytes:
    """CURVES over the epochs as SVG: a line for each run, in the colour of its setting."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = chart(4.2 * len(CURVES), 3.6, len(CURVES))
    for axis, column in zip(axes, CURVES, strict=True):
        for number, group in enumerate(groups):
            for run in group.runs:
                rows = [row for row in run.epochs if row.get(column, ABSENT) != ABSENT]
                label = group.letter if run is group.runs[0] else None
                points = [row["epoch"] for row in rows], [row[column] for row in rows]
                axis.plot(*points, label=label, marker=".", alpha=0.8, **line_style(number))
        axis.set(title=column, xlabel="epoch")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    drawing = BytesIO()
    figure.savefig(drawing, format="svg")
    return drawing.getvalue()
