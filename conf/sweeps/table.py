"""The table of results: on the terminal, and as a CSV file."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from train_utils.run.whole_files import whole_file
from train_utils.terminal.screen import say_table


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows, with a star at the highest AP, and write them to the CSV file ``path``.

    All rows have the same keys. Instead of a number, AP may be a word, such as "failed", or None.
    """
    with whole_file(path) as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    best = max((row["AP"] for row in rows if isinstance(row["AP"], float)), default=None)
    print()
    say_table(list(rows[0]), [[_text(value, best) for value in row.values()] for row in rows])
    print(f"\n{os.path.relpath(path)} has this table", flush=True)


def _text(value: Any, best: float | None) -> str:
    if isinstance(value, float):
        return f"{value:.4f}{' *' if value == best else ''}"
    return "" if value is None else str(value)
