"""What a person sees of a run: lines, and progress on stderr."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import IO, TypeVar, cast

from rich import progress as bars
from rich.console import Console

from data.output import STDERR, STDOUT, Output

T = TypeVar("T")
LogLine = Callable[[str], object]  # takes a line, such as log.info

SECONDS_BETWEEN_UPDATES = 0.5  # of a live line: reading a loss waits for the device
SECONDS_BETWEEN_LINES = 10.0  # where no line can be rewritten


class _Screen(Console):
    def show_cursor(self, show: bool = True) -> bool:
        """Leave the cursor on: a killed process could not bring it back."""
        return False


SCREEN = _Screen(file=cast(IO[str], STDERR), markup=False, emoji=False, highlight=False)


def is_live() -> bool:
    """Whether stdout and stderr are a terminal where a line can be rewritten."""
    return STDOUT.isatty() and STDERR.isatty() and SCREEN.is_terminal and not SCREEN.is_dumb_terminal


def _print(text: str, stream: Output) -> None:
    if is_live():
        SCREEN.print(text, soft_wrap=True)
    else:
        stream.write(f"{text}\n")


class _Stdout(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Print the lines of a record, on a terminal clear of a live line."""
        _print(record.getMessage(), STDOUT)


log = logging.getLogger("hydra_yolov3_spp")  # what programs report; rank 0 alone does
log.setLevel(logging.INFO)
log.addHandler(_Stdout())


def warn(text: str) -> None:
    """Print a warning to stderr."""
    _print(f"warning: {text}", STDERR)


class Progress(AbstractContextManager["Progress"]):
    """Progress through ``total`` units of work, 0 if that is unknown; silent unless enabled.

    On a terminal it is a live line, otherwise one line per SECONDS_BETWEEN_LINES at most.
    """

    def __init__(self, total: int, title: str, enabled: bool, unit: str = "img") -> None:
        self.total, self.title = total, title
        self._unit = unit
        self.done = 0  # units
        self._started = self._last = time.monotonic()
        self._enabled = enabled
        self._bar = _start_bar(title, total) if enabled and is_live() else None

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, units: int) -> None:
        """Count ``units`` more as finished."""
        self.at(self.done + units)

    def at(self, done: int, metrics: Callable[[], Mapping[str, str]] = dict) -> None:
        """Report that ``done`` units are finished; the live line goes after the last.

        ``metrics`` is called only if it is shown: it may wait for the device.
        """
        self.done, now = done, time.monotonic()
        total = self.total
        wait = SECONDS_BETWEEN_LINES if self._bar is None else SECONDS_BETWEEN_UPDATES
        if self._enabled and now - self._last > wait:
            self._last = now
            seconds = max(now - self._started, 1e-9)
            parts = [f"{done}/{total}" if total else str(done), *map(" ".join, metrics().items())]
            parts.append(f"{done / seconds:.3g} {self._unit}/s")
            if total and done:
                parts.append(f"{duration(seconds / done * (total - done))} left")
            if self._bar is None:
                STDERR.write("  ".join([self.title, *parts]) + "\n")
            else:
                text = "  ".join(parts)
                self._bar.update(bars.TaskID(0), completed=done, total=total or None, text=text, refresh=True)
        if self._bar is not None and 0 < total <= done:
            self._bar.stop()


def tracked(items: Iterable[T], total: int, title: str, unit: str = "img") -> Iterator[T]:
    """Yield the ``total`` items; a live line counts those already handled, on a terminal only."""
    with Progress(total, title, enabled=is_live(), unit=unit) as progress:
        for item in items:
            yield item
            progress.advance(1)


def counted(number: int, noun: str) -> str:
    """``1 image``, ``2,000 images``, ``3 boxes``."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith(('s', 'x')) else 's'}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as in 1:02:03 or 100:00:00."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _start_bar(title: str, total: int) -> bars.Progress:
    """A live line without a thread, which would be alive while data workers are forked."""
    label = bars.TextColumn("{task.description}", markup=False)
    text = bars.TextColumn("{task.fields[text]}", markup=False)
    columns = label, bars.BarColumn(bar_width=None), text
    bar = bars.Progress(
        *columns,
        console=SCREEN,
        auto_refresh=False,
        transient=True,
        expand=True,
        redirect_stdout=False,
        redirect_stderr=False,  # other threads keep their streams
    )
    bar.add_task(title, total=total or None, text="")
    bar.start()
    return bar
