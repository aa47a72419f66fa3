"""The output of a run: its log, a table with one row per epoch, and progress bars."""

from __future__ import annotations

import csv
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from train_utils.errors import TrainError
from train_utils.memory.out_of_memory import process_peak
from train_utils.run.whole_files import whole_file

SECONDS_BETWEEN_UPDATES = 0.5  # of a bar: reading a loss waits for the device


class RunLog:
    """Writes lines to the terminal and, with ``run_dir``, to its ``train.log``; on rank 0 only."""

    def __init__(self, run_dir: Path | None, is_main: bool) -> None:
        self._is_main = is_main
        self._path = run_dir / "train.log" if run_dir is not None else None
        self._failed = False

    def line(self, text: str | None) -> None:
        """Write ``text``, in the file with a timestamp; skip None and empty text.

        If the file cannot be written, as on a full disk, warn once on the terminal and continue.
        """
        if not self._is_main or not text:
            return
        tqdm.write(text)  # keeps clear of a progress bar
        sys.stdout.flush()
        if self._path is None:
            return
        try:
            # Opened for each line: a kill loses nothing, and the log may be moved away.
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        except OSError as error:
            if not self._failed:
                _warn(f"cannot write {self._path} ({error.strerror}): until it can, its lines appear only here")
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
                _warn(f"cannot write {self._path} ({error.strerror}): its rows wait until it can")
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


class Progress:
    """Progress through ``total`` units of work; silent unless enabled.

    A terminal gets a bar, other output at most ``lines`` lines. Figures cost a wait for the device,
    so ask ``due`` before computing them::

        if progress.due(done):
            progress.show(done, loss=loss.item())
    """

    def __init__(self, total: int, description: str, enabled: bool, lines: int = 10) -> None:
        self._total, self._description, self._lines = total, description, lines
        self._done, self._lines_shown = 0, 0
        self._started = self._last_update = time.monotonic()
        self._enabled = enabled
        self._bar = tqdm(total=total, desc=description, leave=False) if enabled and sys.stderr.isatty() else None

    def due(self, done: int) -> bool:
        """Whether it is time to show something, with ``done`` units finished."""
        if self._bar is not None:
            return done == self._total or time.monotonic() - self._last_update > SECONDS_BETWEEN_UPDATES
        return self._enabled and done * self._lines >= (self._lines_shown + 1) * self._total

    def show(self, done: int, **figures: float) -> None:
        """Show that ``done`` units are finished, with the figures so far."""
        self._done, self._last_update = done, time.monotonic()
        text = "  ".join([*(f"{name} {value:.4g}" for name, value in figures.items()), *_memory()])
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(done - self._bar.n)
            self._bar.refresh()
        elif self._enabled:
            self._lines_shown = done * self._lines // self._total
            seconds_left = (time.monotonic() - self._started) / done * (self._total - done)
            left = timedelta(seconds=int(seconds_left))
            print(f"{self._description}  {done}/{self._total}  {text}  ETA {left}", flush=True)

    def advance(self, units: int) -> None:
        """Count ``units`` more as finished; show them when due."""
        self._done += units
        if self.due(self._done):
            self.show(self._done)

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self._bar is not None:
            self._bar.close()


def _warn(text: str) -> None:
    tqdm.write(f"warning: {text}", file=sys.stderr)


def _memory() -> list[str]:
    """Peak memory so far, of the GPU if one is in use, else of this process; empty if unknown."""
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else process_peak()
    return [] if peak is None else [f"memory {peak / 1e9:.1f} GB"]
