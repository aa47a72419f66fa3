"""The loggers of a run, on rank 0: none can end it, and none can hold it for long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any
from uuid import uuid4

from train_utils.distributed import World
from train_utils.errors import TrainError
from train_utils.loggers.config import LoggerConfig
from train_utils.loggers.interface import LoggedRun, Logger
from train_utils.loggers.mlflow import MlflowLogger
from train_utils.loggers.tensorboard import TensorBoardLogger
from train_utils.loggers.wandb import WandbLogger
from train_utils.run.log import MetricsCsv
from train_utils.run.run_folder import on_main
from train_utils.run.run_state import LOSS_NAMES
from train_utils.run.whole_files import whole_file
from train_utils.scores.coco_eval import ABSENT, FIGURES, CocoResult

SERVICES: dict[str, Callable[..., Logger]] = {
    "tensorboard": TensorBoardLogger, "wandb": WandbLogger, "mlflow": MlflowLogger,
}  # fmt: skip
LOGGERS: dict[str, Callable[[LoggedRun], Logger]] = {}  # of the plugins in use, by name
END_SECONDS = 20.0  # that the end of a training waits for each logger


class LoggerThread:
    """Calls a logger in a thread of its own: one that fails or hangs is a warning, once.

    No executor, because Python waits for the threads of those before it ends.
    """

    def __init__(self, name: str, logger: Logger, warn: Callable[[str], None]) -> None:
        self._name, self._logger, self._warn, self._warned = name, logger, warn, False
        self._messages: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()  # a method and its arguments
        self._thread = Thread(target=self._work, name=f"logger-{name}", daemon=True)
        self._thread.start()

    def send(self, method: str, *content: Any) -> None:
        """Queue a call of the logger's ``method``; never waits."""
        self._messages.put((method, *content))

    def close(self, complete: bool) -> None:
        """Let the logger take what waits and close, for END_SECONDS at most."""
        self.send("close", complete)
        self._messages.put(None)
        self._thread.join(END_SECONDS)
        if self._thread.is_alive():
            self._warn_once("does not answer")

    def _work(self) -> None:
        for method, *content in iter(self._messages.get, None):
            try:
                getattr(self._logger, method)(*content)
            except Exception as error:  # of somebody else's client: of any kind
                self._warn_once(f"failed ({in_short(error)})")

    def _warn_once(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"warning: logger={self._name} {what}: the training is whole, figures may be missing there")


class Loggers:
    """Writes ``steps.csv`` and hands figures and pictures to the chosen services."""

    def __init__(self, folder: Path, steps: MetricsCsv) -> None:
        self._folder, self._steps = folder, steps
        self._threads: list[LoggerThread] = []
        self._complete = False

    def start(self, names: Sequence[str], run: LoggedRun, config: LoggerConfig, warn: Callable[[str], None]) -> None:
        """Start loggers. If one cannot start, a new run raises TrainError, a resumed one warns."""
        for name in names:
            try:
                logger = LOGGERS[name](run) if name in LOGGERS else SERVICES[name](run, getattr(config, name))
            except Exception as error:  # of somebody else's client: of any kind
                reason = f"logger={name} cannot start ({in_short(error)})"
                if run.step == 0:
                    raise TrainError(f"{reason}. fix: that, or leave {name} out") from error
                warn(f"warning: {reason}: the training is whole, figures are missing there")
            else:
                self._threads.append(LoggerThread(name, logger, warn))

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the learning rate and the losses of a step."""
        self._steps.write({"step": step, **figures})
        self._scalars(step, "train", figures)

    def epoch(self, step: int, row: Mapping[str, float], speed: Mapping[str, float]) -> None:
        """Log the figures of an epoch: its row of metrics.csv, and how fast it was."""
        self._scalars(step, "epoch", {name: row[name] for name in ("epoch", "lr", *LOSS_NAMES)})
        self._scalars(step, "val", {name: row[name] for name in FIGURES if name in row})
        self._scalars(step, "speed", speed)

    def pictures(self, step: int, pattern: str) -> None:
        """Log the pictures of the run folder that match, by their names there."""
        for path in sorted(self._folder.glob(pattern)):
            self._send("picture", step, path.relative_to(self._folder).with_suffix("").as_posix(), path)

    def result(self, step: int, best: Mapping[str, float], scores: CocoResult) -> None:
        """Log the best epoch's figures, the last evaluation by class, and the plots."""
        self._scalars(step, "best", best)
        columns = list(next(iter(scores.per_class.values())))
        rows = [(name, *row.values()) for name, row in scores.per_class.items()]
        self._send("table", step, "classes", ["class", *columns], rows)
        self.pictures(step, "plots/*.[jp][pn]g")
        self._complete = True

    def close(self) -> None:
        """Let the services take what waits."""
        for thread in self._threads:
            thread.close(self._complete)

    def _scalars(self, step: int, group: str, figures: Mapping[str, float]) -> None:
        present = {name: figure for name, figure in figures.items() if figure != ABSENT}
        if present:
            self._send("scalars", step, group, present)

    def _send(self, method: str, *content: Any) -> None:
        for thread in self._threads:
            thread.send(method, *content)


@contextmanager
def open_loggers(
    config: LoggerConfig,
    world: World,
    folder: Path,
    step: int,
    options: dict[str, Any],
    warn: Callable[[str], None],
) -> Iterator[Loggers]:
    """Start the loggers on rank 0 after ``step`` steps of a run; close them after the body.

    ``options`` are the run's. ``warn`` gets warnings, also from other threads. Raises TrainError on
    all ranks if a service cannot start in a new run. In a resumed run that is a warning: a job that
    is requeued at night must not end because a service is away.
    """
    loggers = Loggers(
        folder, MetricsCsv(folder / "steps.csv", ("step", "lr", *LOSS_NAMES), world.is_main, step, "step")
    )
    names = [*config.services, *LOGGERS]

    def start() -> None:
        if names:
            loggers.start(names, LoggedRun(folder, own_id(folder), step, options), config, warn)

    try:
        on_main(world, start)
        yield loggers
    finally:
        loggers.close()


def own_id(folder: Path) -> str:
    """The id by which services find the run in ``folder`` again, from ``run_id.txt``."""
    path = folder / "run_id.txt"
    if not path.exists():
        with whole_file(path) as file:
            file.write(uuid4().hex[:12])
    return path.read_text()


def in_short(error: BaseException) -> str:
    """The kind of an error and its first line."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])[:200]
