"""Files of text that grow during a run, and tables of one row an epoch or step."""

import csv
import io
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from conf import errors
from conf.cli import run_files
from data import progress


def of_busy_cores(threads: int) -> str | None:
    """A line for busy cores, where ``threads`` of an operator wait for each other; else None."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0]
    if threads == 1 or load <= 1.5 * cores:
        return None
    fix = "OMP_NUM_THREADS=1 before the command may be many times as fast"
    return f"the {cores} cores are busy (load {load:.0f}):\n  {fix}"


class GrowingFile:
    """A text file, opened for each addition: a kill loses nothing, and it may be moved away.

    While it cannot be written, as on a full disk, additions wait; the first failure is a warning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting = ""
        self._failed = False

    def add(self, text: str) -> None:
        """Append whole lines, after those that wait."""
        self._waiting += text
        size = None
        try:
            # A pipe without a reader is an error, not a wait; so is a link to another place.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW
            descriptor = os.open(self._path, flags, 0o666)
            with open(descriptor, "a", newline="", encoding="utf-8", errors="backslashreplace") as file:
                size = file.tell()
                file.write(self._waiting)
        except OSError as error:
            if size is not None:
                with suppress(OSError):
                    os.truncate(self._path, size)  # remove a partial line
            if not self._failed:
                progress.warn(f"cannot write {self._path} ({error.strerror}): its lines wait until it can")
            self._failed = True
        else:
            self._waiting = ""
            self._failed = False


class MetricsCsv:
    """A table such as ``metrics.csv``, to which each row is appended at once."""

    def __init__(self, path: Path, columns: Sequence[str], done: int = 0) -> None:
        """Start the file, or keep its rows whose first column is at most ``done``, to resume there.

        Values stay under their names, if an older version wrote other columns. Raises TrainError if
        it cannot be written.
        """
        self._file = GrowingFile(path)
        self._columns = columns
        rows = []
        if done > 0 and path.is_file():
            text = path.read_bytes().decode(errors="surrogateescape")
            lines = text[: text.rfind("\n") + 1].splitlines()  # a kill may have cut the last
            for line in lines[1:]:
                row = dict(zip(lines[0].split(","), line.split(","), strict=False))
                number = row.get(columns[0], "")
                if number.isdecimal() and int(number) <= done:
                    rows.append(row)
        try:
            with run_files.whole_file(path) as file:
                table = csv.DictWriter(file, columns, extrasaction="ignore")
                table.writeheader()
                table.writerows(rows)
        except OSError as error:
            raise errors.TrainError(f"cannot write {path} ({error.strerror}). fix: choose another run_dir") from error

    def write(self, row: Mapping[str, object]) -> None:
        """Append a row; a column without a value stays empty."""
        text = io.StringIO()
        csv.DictWriter(text, self._columns).writerow(row)
        self._file.add(text.getvalue())


# Of the table on the terminal: widths by title.
EPOCH_COLUMNS = {"epoch": 7, **dict.fromkeys("loss box obj cls P R AP AP50 img/s mem".split(), 5), "left": 8}


def epoch_row(cells: Sequence[str | float]) -> str:
    """A row below the titles EPOCH_COLUMNS: texts whole, of numbers up to four digits that fit."""
    texts = []
    for cell, width in zip(cells, EPOCH_COLUMNS.values(), strict=True):
        digits = 4
        text = cell if isinstance(cell, str) else f"{cell:.{digits}g}"
        while len(text) > width and digits > 1 and not isinstance(cell, str):
            digits -= 1
            text = f"{cell:.{digits}g}"
        texts.append(text.rjust(width))
    return " ".join(texts)
