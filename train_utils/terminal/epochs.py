"""The table of a training: a row for each epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from train_utils.scores.coco_eval import ABSENT
from train_utils.terminal.progress import duration
from train_utils.terminal.screen import columns

GAP = "  "


class Column(NamedTuple):
    """A column of the table; those of the highest ``order`` give way on a narrow terminal."""

    key: str
    title: str
    width: int
    order: int
    text: Callable[[Any], str] = str  # of a value


def _brief(value: float) -> str:
    text = f"{value:.4g}"
    return text if len(text) <= 7 else f"{value:.1e}"


def _figure(value: float) -> str:
    return "-" if value == ABSENT else f"{value:.3f}"


COLUMNS = (
    Column("epoch", "epoch", 7, 0),
    Column("step", "step", 7, 7),
    Column("loss", "loss", 7, 0, _brief),
    Column("loss_box", "box", 7, 3, _brief),
    Column("loss_objectness", "obj", 7, 3, _brief),
    Column("loss_classification", "cls", 7, 3, _brief),
    Column("AP", "AP", 5, 0, _figure),
    Column("AP50", "AP50", 5, 1, _figure),
    Column("AP75", "AP75", 5, 6, _figure),
    Column("images_per_second", "img/s", 5, 1, lambda value: f"{value:.3g}" if value < 1000 else f"{value:.0f}"),
    Column("waiting", "wait", 4, 4, lambda value: f"{value:.0%}"),
    Column("memory", "mem", 5, 5),
    Column("seconds", "time", 8, 2, duration),
    Column("left", "left", 8, 8, duration),
    Column("best", "best", 4, 0),
)


class EpochTable:
    """The rows of one training, under one header.

    ``log(text, on_screen, style)`` writes ``text`` to a file and shows the columns that fit.
    """

    def __init__(self, log: Callable[[str, str, str], None]) -> None:
        self._log = log
        self._shown: list[Column] = []  # the columns of the last header

    def add(self, values: Mapping[str, float | str], is_best: bool) -> None:
        """Add a row; ``values`` are by the keys of COLUMNS, and "-" stands where there is none."""
        cells = {column.key: column.text(values[column.key]) for column in COLUMNS if column.key in values}
        shown = fitting(width) if (width := columns()) is not None else list(COLUMNS)
        lines = [({column.key: column.title for column in COLUMNS}, "bold")] if shown != self._shown else []
        for line, style in [*lines, (cells | {"best": "*" if is_best else ""}, "bold green" if is_best else "")]:
            self._log(_row(line, list(COLUMNS)), _row(line, shown), style)
        self._shown = shown


def fitting(width: int) -> list[Column]:
    """The columns that fit into ``width``, in their order."""
    most = max(column.order for column in COLUMNS)
    choices = [[column for column in COLUMNS if column.order <= order] for order in range(most, 0, -1)]
    least = [column for column in COLUMNS if column.order == 0]
    return next((chosen for chosen in choices if len(_row({}, chosen)) <= width), least)


def _row(cells: Mapping[str, str], columns: list[Column]) -> str:
    return GAP.join(f"{cells.get(column.key, '-'):>{column.width}}" for column in columns).rstrip()
