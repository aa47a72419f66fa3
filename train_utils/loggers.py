"""Loggers of a run, on rank 0: CSV always, services where chosen; none can end or delay it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol
from uuid import uuid4

import cv2
import yaml

from train_utils.coco_eval import ABSENT, FIGURES, CocoResult
from train_utils.config import LoggerConfig
from train_utils.distributed import World
from train_utils.errors import TrainError
from train_utils.files import whole_file
from train_utils.log import MetricsCsv
from train_utils.run_folder import on_main
from train_utils.train_state import LOSS_NAMES

Cell = str | float


@dataclass(frozen=True)
class LoggedRun:
    """What a logger knows of the run when it starts."""

    folder: Path
    run_id: str  # the same each time the run is resumed
    step: int  # steps done, above 0 if the run is resumed; later ones of an earlier start are void
    options: dict[str, Any]  # nested dictionaries of numbers and strings


class Logger(Protocol):
    """A place for the figures of one run; any method may raise any exception.

    A logger is made, called and closed in one thread of its own.
    """

    def scalars(self, step: int, group: str, figures: Mapping[str, float]) -> None:
        """Take the figures of a group, such as ``train``, after ``step`` optimiser steps."""

    def picture(self, step: int, name: str, path: Path) -> None:
        """Take the PNG or JPEG in ``path``, which does not change any more."""

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Take a table; each row has a cell for each column."""

    def close(self, complete: bool) -> None:
        """Write out what is left; ``complete`` unless the run stopped or failed before its end."""


FLUSH_SECONDS = 10  # a kill loses at most the figures of this time


class TensorBoardLogger:
    """Writes event files; of a resumed run, TensorBoard drops what was logged after its step."""

    def __init__(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(run.folder / "tensorboard", purge_step=run.step + 1, flush_secs=FLUSH_SECONDS)
        self._writer.add_text("configuration", f"```\n{yaml.safe_dump(run.options, sort_keys=False)}```", run.step)

    def scalars(self, step: int, group: str, figures: Mapping[str, float]) -> None:
        """Add a point to each curve ``<group>/<name>``."""
        for name, figure in figures.items():
            self._writer.add_scalar(f"{group}/{name}", figure, step)

    def picture(self, step: int, name: str, path: Path) -> None:
        """Add a picture."""
        self._writer.add_image(name, cv2.imread(str(path), cv2.IMREAD_COLOR_RGB), step, dataformats="HWC")

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Add a table as text in Markdown."""
        cells = ([f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows)
        lines = [columns, ["---"] * len(columns), *cells]
        self._writer.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in lines), step)

    def close(self, complete: bool) -> None:
        """Write the events that still wait."""
        self._writer.close()


FINISH_SECONDS = 15  # for what the service has not taken yet; the rest stays on the disk


class WandbLogger:
    """Logs into one run of the service, which has the id of the run; its project is ``name``."""

    def __init__(self, run: LoggedRun) -> None:
        """Open the run. Raises wandb's errors without a login or a connection."""
        import wandb

        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise wandb.errors.UsageError("no login here: wandb login, or WANDB_MODE=offline")
        self._wandb = wandb
        self._run = wandb.init(
            project=run.options["name"], name=run.folder.name, id=run.run_id, resume="allow", config=run.options,
            allow_val_change=True, dir=run.folder,
            reinit="create_new",  # a sweep trains several runs in one process
            settings=wandb.Settings(
                console="off", silent=True, finish_timeout=FINISH_SECONDS, finish_timeout_raises=False
            ),
        )  # fmt: skip
        # Its own count of calls cannot go back, but a resumed run repeats steps.
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, group: str, figures: Mapping[str, float]) -> None:
        """Add a point to each curve ``<group>/<name>`` over ``step``."""
        self._run.log({"step": step, **{f"{group}/{name}": figure for name, figure in figures.items()}})

    def picture(self, step: int, name: str, path: Path) -> None:
        """Upload a picture."""
        self._run.log({"step": step, name: self._wandb.Image(str(path))})

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Upload a table."""
        data = [list(row) for row in rows]
        self._run.log({"step": step, name: self._wandb.Table(columns=list(columns), data=data)})

    def close(self, complete: bool) -> None:
        """Wait for the uploads; the service shows a run that is not ``complete`` as failed."""
        self._run.finish(exit_code=0 if complete else 1)


SERVICES: dict[str, Callable[[LoggedRun], Logger]] = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger}
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

    def _warn_once(self, failure: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"warning: logger={self._name} {failure}: the training is whole, figures may be missing there")


class Loggers:
    """Writes ``steps.csv`` and hands figures and pictures to the chosen services."""

    def __init__(self, folder: Path, steps: MetricsCsv, every_steps: int) -> None:
        self._folder, self._steps, self._every_steps = folder, steps, every_steps
        self._threads: list[LoggerThread] = []
        self._complete = False

    def start(self, config: LoggerConfig, step: int, options: dict[str, Any], warn: Callable[[str], None]) -> None:
        """Start the services and the loggers of plugins.

        If one cannot start, a new run raises TrainError, a resumed one warns: a job that is
        requeued at night must not end because a service is away.
        """
        for name in [*config.services, *LOGGERS]:
            run = LoggedRun(self._folder, own_id(self._folder), step, options)
            try:
                logger = (LOGGERS | SERVICES)[name](run)
            except Exception as error:  # of somebody else's client: of any kind
                reason = f"logger={name} cannot start ({in_short(error)})"
                if step == 0:
                    raise TrainError(f"{reason}. fix: that, or leave {name} out") from error
                warn(f"warning: {reason}: the training is whole, figures are missing there")
            else:
                self._threads.append(LoggerThread(name, logger, warn))

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the learning rate and the losses of a step, if it is one of each ``every_steps``."""
        if self._every_steps == 0 or step % self._every_steps != 0:
            return
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

    ``options`` are the run's. ``warn`` gets warnings, also from other threads. Raises the error of
    ``Loggers.start`` on all ranks.
    """
    steps = MetricsCsv(folder / "steps.csv", ("step", "lr", *LOSS_NAMES), world.is_main, step, "step")
    loggers = Loggers(folder, steps, config.every_steps)
    try:
        on_main(world, lambda: loggers.start(config, step, options, warn))
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
