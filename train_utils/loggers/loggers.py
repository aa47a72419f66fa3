"""All loggers of a run, on rank 0: what the training reports goes to each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from train_utils.distributed import World
from train_utils.loggers.background import Background
from train_utils.loggers.config import LoggerConfig
from train_utils.loggers.interface import Cell, LoggedRun, Logger
from train_utils.run.run_folder import on_main
from train_utils.run.run_state import LOSS_NAMES
from train_utils.scores.coco_eval import ABSENT, FIGURES, CocoResult

PATIENCE = {True: 60.0, False: 10.0}  # seconds for the last messages; fewer before a stop or failure


class Loggers:
    """Hands what it gets to each logger; none on other ranks."""

    def __init__(self, loggers: Sequence[Background], folder: Path) -> None:
        self._loggers, self._folder = loggers, folder
        self.complete = False  # set at the end of the training

    def scalars(self, step: int, group: str, figures: Mapping[str, float]) -> None:
        """Log the figures of a group after ``step`` optimiser steps; nothing if there are none."""
        if figures:
            self._send(lambda logger: logger.scalars(step, group, figures))

    def pictures(self, step: int, *patterns: str) -> None:
        """Log the pictures of the run folder that match, by their names there."""
        for path in sorted(found for pattern in patterns for found in self._folder.glob(pattern)):
            self._picture(step, path.relative_to(self._folder).with_suffix("").as_posix(), path)

    def epoch(self, step: int, row: Mapping[str, float], speed: Mapping[str, float]) -> None:
        """Log the figures of an epoch: its row of metrics.csv, and how fast it was."""
        for group, names in (("epoch", ("epoch", "lr", *LOSS_NAMES)), ("val", FIGURES)):
            self.scalars(step, group, {name: row[name] for name in names if row.get(name, ABSENT) != ABSENT})
        self.scalars(step, "speed", speed)

    def result(self, step: int, best: Mapping[str, float], scores: CocoResult) -> None:
        """Log the best epoch's figures, the last evaluation as tables, and the pictures."""
        self.scalars(step, "best", {name: figure for name, figure in best.items() if figure != ABSENT})
        classes = scores.per_class
        columns = list(dict.fromkeys(column for row in classes.values() for column in row))
        self._table(step, "figures", ["figure", "value"], list(scores.figures.items()))
        rows: list[Sequence[Cell]] = [
            (name, *(row.get(column, ABSENT) for column in columns)) for name, row in classes.items()
        ]
        self._table(step, "classes", ["class", *columns], rows)
        self.pictures(step, "*.jpg", "*.png", "plots/*.jpg", "plots/*.png")
        self.complete = True

    def _table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        self._send(lambda logger: logger.table(step, name, columns, rows))

    def _picture(self, step: int, name: str, path: Path) -> None:
        self._send(lambda logger: logger.picture(step, name, path))

    def _send(self, message: Callable[[Logger], None]) -> None:
        for logger in self._loggers:
            logger.send(message)

    def _wait_for_start(self, must: bool) -> None:
        for logger in self._loggers:
            logger.wait_for_start(must)

    def _close(self) -> None:
        complete = self.complete
        self._send(lambda logger: logger.close(complete))
        for logger in self._loggers:
            logger.end()
        deadline = time.monotonic() + PATIENCE[complete]
        for logger in self._loggers:
            logger.join(deadline)


@contextmanager
def open_loggers(config: LoggerConfig, world: World, run: LoggedRun, warn: Callable[[str], None]) -> Iterator[Loggers]:
    """Start the loggers on rank 0 and close them after the body; ``warn`` gets their warnings.

    Raises TrainError on all ranks if one cannot start in a new run. In a resumed run that is a
    warning: a job that is requeued at night must not end because a service is away.
    """
    found = [Background(name, start, warn) for name, start in _starts(config, run).items()] if world.is_main else []
    loggers = Loggers(found, run.folder)
    try:
        on_main(world, lambda: loggers._wait_for_start(must=run.step == 0))
        yield loggers
    finally:
        loggers._close()


def _starts(config: LoggerConfig, run: LoggedRun) -> dict[str, Callable[[], Logger]]:
    """How each chosen logger starts, by its name; the modules are imported in its thread."""

    def csv() -> Logger:
        from train_utils.loggers.csv import CsvLogger

        return CsvLogger(run, ("lr", *LOSS_NAMES))

    def tensorboard() -> Logger:
        from train_utils.loggers.tensorboard import TensorBoardLogger

        assert config.tensorboard is not None
        return TensorBoardLogger(run, config.tensorboard)

    def wandb() -> Logger:
        from train_utils.loggers.wandb import WandbLogger

        assert config.wandb is not None
        return WandbLogger(run, config.wandb)

    def mlflow() -> Logger:
        from train_utils.loggers.mlflow import MlflowLogger

        assert config.mlflow is not None
        return MlflowLogger(run, config.mlflow)

    services = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}
    return {"csv": csv} | {name: services[name] for name in config.services}
