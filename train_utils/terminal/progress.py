"""Progress through one piece of work: a live line, or whole lines on stderr for files and pipes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import TracebackType

from rich import progress as bars

from train_utils.memory import device_peak
from train_utils.terminal.screen import SCREEN, cell_line, is_live

SECONDS_BETWEEN_UPDATES = 0.5  # of a live line: reading a loss waits for the device
SECONDS_BETWEEN_LINES = 10.0  # about work without a known end
LEAST_BAR = 8  # cells; figures at the end of the line give way


class Progress:
    """Progress through ``total`` units of work, 0 if that is unknown; silent unless enabled.

    On a terminal or in a notebook it is a live line, otherwise at most ``lines`` lines::

        with Progress(len(images), "evaluate", enabled=True) as progress:
            ...
            progress.at(done, lambda: {"loss": f"{loss.item():.4g}"})

    ``left`` tells the seconds until the end if the work is part of a longer one.
    """

    def __init__(
        self,
        total: int,
        title: str,
        enabled: bool,
        lines: int = 10,
        unit: str = "img",
        left: Callable[[Progress], float] | None = None,
    ) -> None:
        self.total, self.title, self._lines, self._unit, self._left = total, title, lines, unit, left
        self.done, self._shown = 0, 0  # units, and those of the last line
        self._started = self._last = time.monotonic()
        self._first: tuple[int, float] | None = None  # units and seconds when it was told of the first ones
        self._enabled = enabled
        self._bar = _start_bar(title, total) if enabled and is_live() else None
        self._cell = cell_line() if enabled else None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def advance(self, units: int) -> None:
        """Count ``units`` more as finished."""
        self.at(self.done + units)

    def at(self, done: int, figures: Callable[[], Mapping[str, str]] = dict) -> None:
        """Tell that ``done`` units are finished; close after the last.

        ``figures`` are asked for only when they are shown: they may cost a wait for the device.
        """
        self.done = done
        self._first = self._first or (done, self.seconds)
        if self._is_due():
            self._shown, self._last = done, time.monotonic()
            parts = [*(f"{name} {text}" for name, text in figures().items()), self._speed(), f"mem {memory()}"]
            end = [f"{duration(self.seconds_left)} left"] if self.total else []
            if self._bar is None:
                count = f"{done}/{self.total}" if self.total else str(done)
                line = "  ".join([self.title, count, *parts, *end])
                if self._cell is None:
                    print(line, file=sys.stderr, flush=True)
                else:
                    self._cell(line)
            else:
                share = f"{done / self.total:.0%}" if self.total else str(done)
                text = fit([share, *end, *parts], SCREEN.width - len(self.title) - LEAST_BAR - 2)
                self._bar.update(bars.TaskID(0), completed=done, text=text, refresh=True)
        if done == self.total:
            self.close()

    def close(self) -> None:
        """Remove the live line."""
        if self._bar is not None:
            self._bar.stop()
        if self._cell is not None:
            self._cell("")

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    @property
    def pace(self) -> float:
        """Seconds for a unit, without the first ones, which wait for workers to start."""
        done, seconds = self._first or (0, 0.0)
        if done == self.done:
            done, seconds = 0, 0.0
        return (self.seconds - seconds) / max(1, self.done - done)

    @property
    def seconds_left(self) -> float:
        """Seconds until the end, at the pace so far."""
        return self._left(self) if self._left is not None else self.pace * (self.total - self.done)

    def _is_due(self) -> bool:
        if self._bar is not None or self._cell is not None:
            return time.monotonic() - self._last > SECONDS_BETWEEN_UPDATES
        if not self.total:
            return self._enabled and time.monotonic() - self._last > SECONDS_BETWEEN_LINES
        return self._enabled and self.done * self._lines // self.total > self._shown * self._lines // self.total

    def _speed(self) -> str:
        return f"{self.done / max(self.seconds, 1e-9):.3g} {self._unit}/s"


def fit(parts: list[str], room: int) -> str:
    """The first parts that fit into ``room`` columns, with two spaces between."""
    while len(parts) > 1 and len("  ".join(parts)) > room:
        parts = parts[:-1]
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as in 1:02:03."""
    return str(timedelta(seconds=round(seconds)))


def memory() -> str:
    """Peak memory so far, of the GPU if one is in use, else of this process; "-" if unknown."""
    peak = device_peak()
    return "-" if peak is None else f"{peak / 1e9:.1f}G"


def _start_bar(title: str, total: int) -> bars.Progress:
    """A live line without a thread: it would be alive while data workers are forked."""
    label, text = (bars.TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[text]"))
    columns = label, bars.BarColumn(bar_width=None), text
    bar = bars.Progress(*columns, console=SCREEN, auto_refresh=False, transient=True, expand=True)
    bar.add_task(title, total=total or None, text="")
    bar.start()
    return bar
