"""A comparison of runs as text and as ``compare.html``."""

from __future__ import annotations

import shutil
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

from train_utils.report.gains import Gain
from train_utils.report.groups import SEED, Group, differences
from train_utils.report.overlay import draw_overlay
from train_utils.report.page import figure, write_page
from train_utils.report.run_files import Run
from train_utils.report.run_report import shown
from train_utils.scores.coco_eval import FIGURES

COLUMNS = 100  # at most
MORE_SEEDS = "A setting with one run only may be lucky in its seed: repeat it with train.seed=1,2 (train.py -m)."
ONE_GROUP = "All runs have the same setting and differ in train.seed only: their spread is what luck does."


def verdicts(groups: Sequence[Group], gains: Sequence[Gain]) -> list[tuple[str, bool]]:
    """A sentence for each setting against the first, and whether its difference is real."""
    pairs = zip(groups[1:], gains, strict=True)
    return [(f"{group.letter} against {groups[0].letter}: {gain.sentence()}.", gain.is_real) for group, gain in pairs]


def notes(groups: Sequence[Group], resamples: int) -> list[str]:
    """What one must know to read the verdicts."""
    if len(groups) == 1:
        return [ONE_GROUP]
    images = len(groups[0].best[0].truth.image_ids)
    lines = [f"Paired bootstrap: {resamples:,} resamples of the {images:,} validation images, the same for both sides."]
    return lines + [MORE_SEEDS] * any(len(group.runs) == 1 for group in groups)


def text(groups: Sequence[Group], gains: Sequence[Gain], resamples: int) -> list[str]:
    """The comparison as lines for a terminal."""
    titles = ["", "runs", "AP mean", "spread", "AP50", "AP75", "best epochs"]
    lines = aligned([titles, *([group.letter, *cells(group)] for group in groups)])
    lines.append("")
    for group in groups:
        lines += [f"{group.letter}  seed {seed_of(run)}  {run.folder}" for run in group.runs]
    if rows := differences(groups):
        letters = [group.letter for group in groups]
        lines += ["", *aligned([["options", *letters], *([key, *map(shown, values)] for key, values in rows)])]
    columns = min(COLUMNS, shutil.get_terminal_size().columns)
    said = [sentence for sentence, _ in verdicts(groups, gains)]
    for paragraph in (*said, *notes(groups, resamples)):
        lines += ["", *textwrap.wrap(paragraph, columns)]
    return lines


def write_comparison(out: Path, groups: Sequence[Group], gains: Sequence[Gain], resamples: int) -> None:
    """Write the comparison to the page ``out``. Raises OSError."""
    with tempfile.TemporaryDirectory() as folder:
        curves = Path(folder, "curves.svg")
        draw_overlay(groups, curves)
        write_page(
            "compare",
            out,
            title="Comparison of " + ", ".join(group.letter for group in groups),
            groups=groups,
            table=[(group.letter, cells(group)) for group in groups],
            members=[
                (group.letter, seed_of(run), best.scores.figures, run.folder)
                for group in groups
                for run, best in zip(group.runs, group.best, strict=True)
            ],
            figure_names=FIGURES,
            options=[(key, list(map(shown, values))) for key, values in differences(groups)],
            verdicts=verdicts(groups, gains),
            notes=notes(groups, resamples),
            curves=curves,
        )


def cells(group: Group) -> list[str]:
    """The number of runs, AP with its spread, AP50, AP75 and the best epochs of a setting."""
    spread = group.spread()
    return [
        str(len(group.runs)),
        figure(group.mean()),
        figure(spread) if spread is not None else "-",
        figure(group.mean("AP50")),
        figure(group.mean("AP75")),
        ", ".join(str(best.epoch) for best in group.best),
    ]


def seed_of(run: Run) -> str:
    """The seed of a run."""
    return shown(run.options.get(SEED, "-"))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as columns; a cell is cut where a terminal ends."""
    most = (COLUMNS - 2 * len(rows[0])) // 2
    short = [[cell if len(cell) <= most else f"{cell[: most - 3]}..." for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*short, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in short]
