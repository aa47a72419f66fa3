"""Compare runs: options, mean and spread over seeds, and whether a gain is real.

    python -m scripts.compare runs/a                 # of one run the report.html, as far as it is
    python -m scripts.compare runs/a runs/b
    python -m scripts.compare runs/base-0 runs/base-1 runs/wide-0 runs/wide-1

Runs that differ in train.seed only are one setting; the others are compared with the first one.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.programs import run

    run("compare")
    raise SystemExit

from collections.abc import Sequence
from pathlib import Path

from conf.report import report_run
from conf.schema_tools import CompareConfig
from train_utils.coco_eval import format_figure
from train_utils.report import Gain, differences, gain, read_groups

FIGURES = ("AP", "AP50", "AP75")


def compare(config: CompareConfig) -> list[Gain]:
    """Print the comparison; return the gain of each setting over the first.

    Of one run write the report. Raises TrainError if runs cannot be read or compared.
    """
    folders = [Path(run) for run in config.runs]
    if len(folders) == 1:
        print(f"page: {report_run(folders[0])}")
        return []
    groups = read_groups(folders)
    print_table(
        ("setting", "runs", *FIGURES, "spread of AP"),
        [
            (group.letter, str(len(group.runs)), *map(format_figure, [*map(group.mean, FIGURES), group.spread()]))
            for group in groups
        ],
    )
    options = [(key, *map(str, values)) for key, values in differences(groups)]
    print_table(("option", *(group.letter for group in groups)), options)
    print_table(("setting", "folder"), [(group.letter, str(run)) for group in groups for run in group.runs])
    first, *others = groups
    gains = [gain(first, other, config.resamples, config.seed) for other in others]
    for other, of_other in zip(others, gains, strict=True):
        print(f"{other.letter} against {first.letter}: {of_other.sentence()}.")
    if any(len(group.runs) == 1 for group in groups):
        print("A setting with one run only may be lucky in its seed: repeat it with train.seed=1,2 (train.py -m).")
    return gains


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows below their titles."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    print()
