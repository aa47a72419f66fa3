"""The table of a training, a row for each epoch, and the progress within an epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rich.text import Text

from train_utils.scores.coco_eval import ABSENT
from train_utils.terminal.progress import Progress, duration, memory
from train_utils.terminal.screen import SCREEN, say
from train_utils.terminal.time_left import TimeLeft


class Column(NamedTuple):
    """A column of the table; those of the highest ``order`` give way on a narrow terminal."""

    key: str
    title: str
    width: int
    order: int
    text: Callable[[float], str]  # of a value


def _brief(value: float) -> str:
    text = f"{value:.4g}"
    return text if len(text) <= 7 else f"{value:.1e}"


def _figure(value: float) -> str:
    return "-" if value == ABSENT else f"{value:.3f}"


COLUMNS = (
    Column("epoch", "epoch", 5, 0, str),
    Column("step", "step", 7, 7, str),
    Column("loss", "loss", 7, 0, _brief),
    Column("loss_box", "box", 7, 3, _brief),
    Column("loss_objectness", "obj", 7, 3, _brief),
    Column("loss_classification", "cls", 7, 3, _brief),
    Column("AP", "AP", 5, 0, _figure),
    Column("AP50", "AP50", 5, 1, _figure),
    Column("AP75", "AP75", 5, 6, _figure),
    Column("images_per_second", "img/s", 5, 1, lambda value: f"{value:.3g}" if value < 1000 else f"{value:.0f}"),
    Column("waiting", "wait", 4, 4, lambda value: f"{value:.0%}"),
    Column("memory", "mem", 5, 5, str),
    Column("seconds", "time", 8, 2, duration),
    Column("left", "left", 8, 8, duration),
    Column("best", "best", 4, 0, str),
)
GAP = "  "


class EpochTable:
    """The rows of one training, under one header.

    ``log(text, on_screen)`` writes a line; on a terminal ``on_screen`` takes its place, with the
    columns that fit.
    """

    def __init__(self, epochs: int, time_left: TimeLeft, log: Callable[[str, Text], None]) -> None:
        self.epochs, self.time_left, self._log = epochs, time_left, log
        width = max(COLUMNS[0].width, len(f"{epochs}/{epochs}"))
        self._columns = [COLUMNS[0]._replace(width=width), *COLUMNS[1:]]
        self._header: tuple[str, str] | None = None  # as it was logged and shown last

    def end_epoch(self, epoch: int, values: Mapping[str, float], is_best: bool) -> None:
        """Add the row of ``epoch`` (from 1); ``values`` are by the keys of COLUMNS."""
        left = self.time_left.seconds(epoch + 1, 0.0)
        cells = self.cells(epoch, {**values, "left": left}) | {"best": "*" if is_best else ""}
        self._begin()
        on_screen = Text(_row(cells, fitting(self._columns, SCREEN.width)), "bold green" if is_best else "")
        self._log(_row(cells, self._columns), on_screen)

    def say(self, epoch: int, values: Mapping[str, float]) -> None:
        """Print a row about the part of ``epoch`` that is done; it is not logged."""
        self._begin()
        say(_row(self.cells(epoch, values) | {"best": ""}, self._columns))

    def cells(self, epoch: int, values: Mapping[str, float]) -> dict[str, str]:
        """The texts of a row; "-" where there is no value."""
        texts = {column.key: column.text(values[column.key]) for column in COLUMNS if column.key in values}
        return texts | {"epoch": f"{epoch}/{self.epochs}", "memory": memory()}

    def _begin(self) -> None:
        """Log the header, and again when other columns fit."""
        titles = {column.key: column.title for column in COLUMNS}
        header = _row(titles, self._columns), _row(titles, fitting(self._columns, SCREEN.width))
        if header != self._header:
            self._log(header[0], Text(header[1], "bold"))
        self._header = header


class EpochProgress(Progress):
    """Progress through the micro-batches of an epoch; its figures are by the keys of COLUMNS."""

    def __init__(self, table: EpochTable, epoch: int, before: int, total: int, enabled: bool, lines: int) -> None:
        """``before`` is the number of micro-batches that were done before a resume."""
        self._table, self._epoch, self._before = table, epoch, before
        self._warm_at: tuple[int, float] | None = None  # micro-batches and seconds of the first step
        super().__init__(total, f"epoch {epoch}/{table.epochs}", enabled, lines)

    def due(self, done: int) -> bool:
        """As for any progress, but the end of the epoch is told by the row of the epoch."""
        self._warm_at = self._warm_at or (done, self.seconds)
        self.done = done
        return super().due(done) and (self.is_live or done < self.total)

    def say(self, figures: Mapping[str, float]) -> None:
        """Print a row of the table."""
        self._table.say(self._epoch, {**figures, "seconds": self.seconds, "left": self.seconds_left})

    def parts(self, figures: Mapping[str, float]) -> list[str]:
        """What a live line says."""
        cells = self._table.cells(self._epoch, figures)
        speed, waiting = f"{cells['images_per_second']} img/s", f"wait {cells['waiting']}"
        return [f"loss {cells['loss']}", speed, waiting, f"mem {cells['memory']}"]

    @property
    def seconds_left(self) -> float:
        """Seconds until the training ends."""
        share = (self._before + self.done) / (self._before + self.total)
        return self._table.time_left.seconds(self._epoch, share, self.whole_epoch)

    @property
    def whole_epoch(self) -> float:
        """Seconds of a whole epoch at the speed after its first step, which waits for workers."""
        done, seconds = self._warm_at or (0, 0.0)
        if self.done > done:
            seconds, done = self.seconds - seconds, self.done - done
        return seconds / max(1, done) * (self._before + self.total)


def fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """The columns that fit into ``width``, in their order."""
    shown = list(columns)
    while len(shown) > 1 and len(_row({}, shown)) > width:
        last = max(column.order for column in shown)
        shown = [column for column in shown if column.order < last] or shown[:1]
    return shown


def _row(cells: Mapping[str, str], columns: Sequence[Column]) -> str:
    return GAP.join(f"{cells.get(column.key, '-'):>{column.width}}" for column in columns).rstrip()
