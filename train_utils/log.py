"""What a run leaves as text: its log, and tables with one row per epoch."""

from __future__ import annotations

import csv
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from train_utils.errors import TrainError
from train_utils.files import whole_file
from train_utils.progress import print_lines, warn


class RunLog:
    """Writes lines to the terminal and, with ``run_dir``, to its ``train.log``; on rank 0 only."""

    def __init__(self, run_dir: Path | None, is_main: bool) -> None:
        self._is_main = is_main
        self._path = run_dir / "train.log" if run_dir is not None else None
        self._failed = False

    def line(self, text: str | None) -> None:
        """Write ``text``, in the file with a timestamp on each line; skip None and empty text.

        If the file cannot be written, as on a full disk, warn once on the terminal and continue.
        """
        if not self._is_main or not text:
            return
        print_lines(text)
        if self._path is None:
            return
        try:
            # Opened for each line: a kill loses nothing, and the log may be moved away.
            with self._path.open("a", encoding="utf-8") as file:
                stamp = time.strftime("%Y-%m-%d %H:%M:%S")
                file.writelines(f"{stamp} {line}".rstrip() + "\n" for line in text.split("\n"))
        except OSError as error:
            if not self._failed:
                warn(f"cannot write {self._path} ({error.strerror}): until it can, its lines appear only here")
            self._failed = True


def log_warnings(log: RunLog, about: str) -> None:
    """Write warnings that contain ``about`` to the log, within a ``warnings.catch_warnings()``."""
    before = warnings.showwarning

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        if about in str(message):
            log.line(f"warning: {str(message).splitlines()[0]}")
        else:
            before(message, category, filename, lineno, file, line)

    warnings.showwarning = show


class MetricsCsv:
    """A table such as ``metrics.csv``, to which rank 0 appends each row at once."""

    def __init__(
        self, path: Path, columns: Sequence[str], is_main: bool, done: int = 0, counter: str = "epoch"
    ) -> None:
        """Start the file, or keep its rows whose ``counter`` is at most ``done``, to resume there.

        If the old columns differ, rows keep the common ones. Raises TrainError if not writable.
        """
        self._path, self._columns, self._is_main = path, list(columns), is_main
        self._waiting: list[Mapping[str, object]] = []  # rows that could not be written
        self._failed = False  # at the last attempt
        if is_main:
            rows = self._read_until(done, counter) if done > 0 and path.exists() else []
            self._write(rows)

    def write(self, row: Mapping[str, object]) -> None:
        """Append a row; a column without a value stays empty.

        If the file cannot be written, as on a full disk, warn once and keep the rows for later.
        """
        if not self._is_main:
            return
        unknown = set(row) - set(self._columns)
        assert not unknown, f"no columns {sorted(unknown)} in {self._path}"
        self._waiting.append(row)
        whole = None
        try:
            whole = self._path.stat().st_size
            with self._path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns).writerows(self._waiting)
        except OSError as error:
            if whole is not None:
                with suppress(OSError):
                    os.truncate(self._path, whole)  # remove a partial row
            if not self._failed:
                warn(f"cannot write {self._path} ({error.strerror}): its rows wait until it can")
            self._failed = True
            return
        self._waiting.clear()
        self._failed = False

    def _read_until(self, done: int, counter: str) -> list[dict[str, str]]:
        text = self._path.read_text(encoding="utf-8")
        whole_lines = text[: text.rfind("\n") + 1]  # a kill may have cut the last line short
        rows = csv.DictReader(whole_lines.splitlines())
        return [row for row in rows if row.get(counter, "").isdecimal() and int(row[counter]) <= done]

    def _write(self, rows: list[dict[str, str]]) -> None:
        try:
            with whole_file(self._path) as file:
                writer = csv.DictWriter(file, self._columns, extrasaction="ignore")
                writer.writeheader()
                writer.writerows(rows)
        except OSError as error:
            raise TrainError(f"cannot write {self._path} ({error.strerror}). fix: choose another run_dir") from error
