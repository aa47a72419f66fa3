"""Progress through one piece of work: a live line on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType

from rich import progress as bars

from train_utils.memory.peak import device_peak
from train_utils.terminal.screen import SCREEN, is_live, say

SECONDS_BETWEEN_UPDATES = 0.5  # of a live line: reading a loss waits for the device
LEAST_BAR = 10  # cells; figures at the end of the line give way


class Progress:
    """Progress through ``total`` units of work; silent unless enabled.

    A terminal gets a live line, other output at most ``lines`` lines. Figures may cost a wait for
    the device, so ask ``due`` before computing them::

        with Progress(len(batches), "evaluate", enabled=True) as progress:
            ...
            if progress.due(done):
                progress.show(done, loss=loss.item())
    """

    def __init__(self, total: int, title: str, enabled: bool, lines: int = 10, unit: str = "img") -> None:
        self.total, self.title, self._lines, self._unit = total, title, lines, unit
        self.done, self._lines_shown = 0, 0
        self.started = self._last_update = time.monotonic()
        self._enabled = enabled
        self._bar = _start_bar(title, total) if enabled and is_live() else None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def due(self, done: int) -> bool:
        """Whether it is time to show something, with ``done`` units finished."""
        if self._bar is not None:
            return done == self.total or time.monotonic() - self._last_update > SECONDS_BETWEEN_UPDATES
        return self._enabled and done * self._lines >= (self._lines_shown + 1) * self.total

    def show(self, done: int, **figures: float) -> None:
        """Show that ``done`` units are finished, with the figures so far."""
        self.done, self._last_update = done, time.monotonic()
        if self._bar is not None:
            room = SCREEN.width - len(self.title) - LEAST_BAR - 2
            text = fit([f"{done / self.total:.0%}", self.left(), *self.parts(figures)], room)
            self._bar.update(bars.TaskID(0), completed=done, text=text, refresh=True)
        elif self._enabled:
            self._lines_shown = done * self._lines // self.total
            self.say(figures)

    def advance(self, units: int) -> None:
        """Count ``units`` more as finished; show them when due, and close after the last."""
        self.done += units
        if self.due(self.done):
            self.show(self.done)
        if self.done >= self.total:
            self.close()

    def close(self) -> None:
        """Remove the live line from the terminal."""
        if self._bar is not None:
            self._bar.stop()

    def say(self, figures: Mapping[str, float]) -> None:
        """Print a plain line."""
        say("  ".join([self.title, f"{self.done}/{self.total}", *self.parts(figures), self.left()]))

    def parts(self, figures: Mapping[str, float]) -> list[str]:
        """What a line says about the work; the last ones give way on a narrow terminal."""
        speed = f"{self.done / max(self.seconds, 1e-9):.3g} {self._unit}/s"
        return [*(f"{name} {value:.4g}" for name, value in figures.items()), speed, f"mem {memory()}"]

    def left(self) -> str:
        """How long it will take."""
        return f"{duration(self.seconds_left)} left"

    @property
    def is_live(self) -> bool:
        """Whether there is a live line."""
        return self._bar is not None

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    @property
    def seconds_left(self) -> float:
        """Seconds that the rest takes, at the speed so far."""
        return self.seconds / self.done * (self.total - self.done)


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
    columns = (
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(bar_width=None),
        bars.TextColumn("{task.fields[text]}", markup=False),
    )
    bar = bars.Progress(
        *columns,
        console=SCREEN,
        auto_refresh=False,
        transient=True,
        expand=True,
        redirect_stderr=sys.stderr.isatty(),
    )
    bar.add_task(title, total=total, text="")
    bar.start()
    return bar
