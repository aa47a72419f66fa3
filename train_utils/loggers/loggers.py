"""The loggers of a run, on rank 0: none can end it, and none can hold it for long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
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
START_SECONDS, END_SECONDS = 30.0, 20.0  # that the training waits for services in all
MOST_WAITING = 10_000  # messages


class LoggerThread:
    """A logger in its own thread, which may fail or hang: it warns once, the training goes on.

    No executor, because Python waits for the threads of those before it ends.
    """

    def __init__(self, name: str, start: Callable[[], Logger], warn: Callable[[str], None]) -> None:
        self.name, self.started = name, Future[None]()
        self._start, self._warn, self._warned = start, warn, False
        self._messages: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()  # a method and its arguments
        self._thread = Thread(target=self._work, name=f"logger-{name}", daemon=True)
        self._thread.start()

    def send(self, method: str, *content: Any) -> None:
        """Queue a call of the logger's ``method``; never waits."""
        if self._messages.qsize() >= MOST_WAITING:
            self.warn_once("is far behind")
        elif self._thread.is_alive():  # else it could not start
            self._messages.put((method, *content))

    def end(self, complete: bool) -> None:
        """Ask the logger to close after what waits; never waits."""
        self._messages.put(("close", complete))
        self._messages.put(None)

    def join(self, deadline: float) -> None:
        """Wait for that until ``deadline`` (time.monotonic)."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self.warn_once("does not answer")

    def warn_once(self, what: str) -> None:
        """Write the first warning about this logger."""
        if not self._warned:
            self._warned = True
            self._warn(f"warning: logger={self.name} {what}: the training is whole, figures may be missing there")

    def _work(self) -> None:
        try:
            logger = self._start()
        except Exception as error:  # of somebody else's client: of any kind
            return self.started.set_exception(error)
        self.started.set_result(None)
        for method, *content in iter(self._messages.get, None):
            try:
                getattr(logger, method)(*content)
            except Exception as error:  # as above
                self.warn_once(f"failed ({in_short(error)})")


class Loggers:
    """Writes ``steps.csv`` and hands figures and pictures to the chosen services."""

    def __init__(self, threads: Sequence[LoggerThread], folder: Path, steps: MetricsCsv) -> None:
        self._threads, self._folder, self._steps = threads, folder, steps
        self._complete = False

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

    def wait_for_start(self, must: bool) -> None:
        """Wait for the services. Raises TrainError if one cannot start and ``must``, else warns."""
        wait([thread.started for thread in self._threads], START_SECONDS)
        for thread in self._threads:
            if not thread.started.done():
                thread.warn_once("does not answer")
            elif (error := thread.started.exception()) is not None:
                if must:
                    fix = "that, or leave it out"
                    text = f"logger={thread.name} cannot start ({in_short(error)}). fix: {fix}"
                    raise TrainError(str(error) if isinstance(error, TrainError) else text) from error
                thread.warn_once(f"cannot start ({in_short(error)})")

    def close(self) -> None:
        """Let the services take what waits, for END_SECONDS at most."""
        for thread in self._threads:
            thread.end(self._complete)
        deadline = time.monotonic() + END_SECONDS
        for thread in self._threads:
            thread.join(deadline)

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
    steps = MetricsCsv(folder / "steps.csv", ("step", "lr", *LOSS_NAMES), world.is_main, step, "step")
    threads = []
    for name in (*config.services, *LOGGERS) if world.is_main else ():
        run = LoggedRun(folder, own_id(folder), step, options)
        start = partial(LOGGERS[name], run) if name in LOGGERS else partial(SERVICES[name], run, getattr(config, name))
        threads.append(LoggerThread(name, start, warn))
    loggers = Loggers(threads, folder, steps)
    try:
        on_main(world, lambda: loggers.wait_for_start(must=step == 0))
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
