"""The table of results: on the terminal, and as a CSV file."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from train_utils.run.whole_files import whole_file
from train_utils.shell import option


def write_table(path: Path, rows: Sequence[Mapping[str, Any]], of: str = "job") -> None:
    """Print ``rows`` (job, setting, folder, result), titled ``of``, and write them to ``path``.

    ``result`` is the AP, another value of the program, or "failed" or "stopped". The best AP has a
    star.
    """
    scores = [row["result"] for row in rows if _is_number(row["result"])]
    best = max(scores, default=math.nan)
    title = (of, "setting", "AP", "folder")
    cells = [title]
    for row in rows:
        folder = os.path.relpath(row["folder"]) if row["folder"] else ""
        cells.append((str(row["job"]), row["setting"], _shown(row["result"], best), folder))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print()
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    with whole_file(path) as file:
        writer = csv.writer(file)
        writer.writerow(title)
        writer.writerows([row["job"], row["setting"], row["result"], row["folder"]] for row in rows)
    print(f"\n{os.path.relpath(path)} has this table")
    chosen = next((row for row in rows if scores and row["result"] == best), None)
    if chosen is not None and chosen["folder"]:
        print(f"the best: python eval.py {option('ckpt', os.path.relpath(chosen['folder']))}", flush=True)


def _is_number(result: Any) -> bool:
    return isinstance(result, int | float) and not isinstance(result, bool) and math.isfinite(result)


def _shown(result: Any, best: float) -> str:
    if not _is_number(result):
        return "" if result is None else str(result)
    return f"{result:.4f}{' *' if result == best else ''}"
