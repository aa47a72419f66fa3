"""The table of results: on the terminal, and as a CSV file."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from train_utils.run.whole_files import whole_file


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows, with a star at the highest AP, and write them to the CSV file ``path``.

    They have the same keys. AP may be a word instead, such as "failed", or None.
    """
    with whole_file(path) as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    best = max((row["AP"] for row in rows if isinstance(row["AP"], float)), default=None)
    cells = [list(rows[0])]
    for row in rows:
        values = ("" if value is None else value for value in row.values())
        cells.append([_digits(value, best) if isinstance(value, float) else str(value) for value in values])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print()
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print(f"\n{os.path.relpath(path)} has this table", flush=True)


def _digits(value: float, best: float | None) -> str:
    return f"{value:.4f}{' *' if value == best else ''}"
