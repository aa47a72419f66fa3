"""Loggers of a run, on rank 0: CSV always, services where chosen; none can end or delay it.

A service, here or in a plugin, is a class that is made of a LoggedRun, called and closed in one
thread of its own. It has the methods of TensorBoardLogger, which may raise any exception.
"""

import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import torch
import yaml

from conf import errors, run_files
from conf.train_options import LoggerConfig
from data import progress
from train_utils import coco_eval, engine
from train_utils.log import EPOCH_COLUMNS, MetricsCsv, RunLog, epoch_row
from train_utils.train_state import LOSS_NAMES, TrainState

TABLES = {  # metrics is equal in every repetition of a run
    "metrics": ("epoch", "step", "lr", *LOSS_NAMES, *coco_eval.METRICS, *(f"val_{name}" for name in LOSS_NAMES)),
    "times": ("epoch", "seconds", "images_per_second", "waiting"),
    "steps": ("step", "lr", *LOSS_NAMES),
}


class LoggedRun(NamedTuple):
    """What a logger knows of the run when it starts."""

    folder: Path
    run_id: str  # the same each time the run is resumed
    step: int  # steps done, above 0 if the run is resumed; later ones of an earlier start are void
    options: dict[str, Any]  # nested dictionaries of numbers and strings


FLUSH_SECONDS = 10  # a kill loses at most the metrics of this time


class TensorBoardLogger:
    """Writes event files; of a resumed run, TensorBoard drops what was logged after its step."""

    def __init__(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(run.folder / "tensorboard", purge_step=run.step + 1, flush_secs=FLUSH_SECONDS)
        self._writer.add_text("configuration", f"```\n{yaml.safe_dump(run.options, sort_keys=False)}```", run.step)

    def scalars(self, step: int, group: str, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a group, such as ``train``, after ``step`` optimiser steps."""
        for name, metric in metrics.items():
            self._writer.add_scalar(f"{group}/{name}", metric, step)

    def picture(self, step: int, name: str, path: Path) -> None:
        """Take the PNG or JPEG in ``path``, which does not change any more."""
        self._writer.add_image(name, cv2.imread(str(path), cv2.IMREAD_COLOR_RGB), step, dataformats="HWC")

    def close(self, complete: bool) -> None:
        """Write out what is left; ``complete`` unless the run stopped or failed before its end."""
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

    def scalars(self, step: int, group: str, metrics: Mapping[str, float]) -> None:
        """Add a point to each curve ``<group>/<name>`` over ``step``."""
        self._run.log({"step": step, **{f"{group}/{name}": metric for name, metric in metrics.items()}})

    def picture(self, step: int, name: str, path: Path) -> None:
        """Upload a picture."""
        self._run.log({"step": step, name: self._wandb.Image(str(path))})

    def close(self, complete: bool) -> None:
        """Wait for the uploads; the service shows a run that is not ``complete`` as failed."""
        self._run.finish(exit_code=0 if complete else 1)


SERVICES: dict[str, Callable[[LoggedRun], Any]] = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger}
LOGGERS: dict[str, Callable[[LoggedRun], Any]] = {}  # of the plugins in use, by name
END_SECONDS = 20.0  # that the end of a training waits for each logger


class LoggerThread:
    """Calls a logger in a thread of its own: one that fails or hangs is a warning, once.

    No executor, because Python waits for the threads of those before it ends.
    """

    def __init__(self, name: str, logger: Any, warn: Callable[[str], None]) -> None:
        self._name, self._logger, self._warn, self._warned = name, logger, warn, False
        self._messages: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()  # a method and its arguments
        self._thread = threading.Thread(target=self._work, name=f"logger-{name}", daemon=True)
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
            self._warn(f"warning: logger={self._name} {failure}: the training is whole, metrics may be missing there")


class Loggers:
    """Writes the tables of a run, the row of an epoch to the log, and all of it to the services."""

    def __init__(self, folder: Path, config: LoggerConfig, state: TrainState, epochs: int, log: RunLog) -> None:
        self._folder, self._config, self._state, self._epochs, self._log = folder, config, state, epochs, log
        self._tables: dict[str, MetricsCsv] = {}  # on rank 0
        self._threads: list[LoggerThread] = []
        self._complete, self._first_epoch, self._started = False, state.epoch, time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the training began or was resumed."""
        return time.monotonic() - self._started

    def start(self, options: dict[str, Any]) -> None:
        """Start tables, services and the loggers of plugins, on rank 0; ``options`` are the run's.

        If a service cannot start, a new run raises TrainError, a resumed one warns: a job that is
        requeued at night must not end because a service is away.
        """
        for name, columns in TABLES.items():
            done = self._state.step if columns[0] == "step" else self._state.epoch
            self._tables[name] = MetricsCsv(self._folder / f"{name}.csv", columns, done)
        for name in [*self._config.services, *LOGGERS]:
            run = LoggedRun(self._folder, own_id(self._folder), self._state.step, options)
            try:
                logger = (LOGGERS | SERVICES)[name](run)
            except Exception as error:  # of somebody else's client: of any kind
                reason = f"logger={name} cannot start ({in_short(error)})"
                if run.step == 0:
                    raise errors.TrainError(f"{reason}. fix: that, or leave {name} out") from error
                self._log.line(f"warning: {reason}: the training is whole, metrics are missing there")
            else:
                self._threads.append(LoggerThread(name, logger, self._log.line))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the learning rate and the losses of a step, if it is one of each ``every_steps``."""
        if self._tables and self._config.every_steps > 0 and step % self._config.every_steps == 0:
            self._tables["steps"].write({"step": step, **metrics})
            self._scalars("train", metrics)

    def epoch(
        self, result: engine.EpochResult, evaluation: coco_eval.Evaluation | None, seconds: float, is_best: bool
    ) -> None:
        """Log the epoch that the state has just counted, which took ``seconds``."""
        if not self._tables:
            return
        state = self._state
        metrics, losses = (evaluation.metrics, evaluation.losses) if evaluation is not None else ({}, {})
        row = {"epoch": state.epoch, "step": state.step, "lr": result.lr, **result.losses, **metrics}
        row |= {f"val_{name}": loss for name, loss in losses.items()}
        speed = {"seconds": seconds, "images_per_second": result.images_per_second, "waiting": result.waiting}
        self._tables["metrics"].write(row)
        self._tables["times"].write({"epoch": state.epoch, **speed})
        self._scalars("epoch", {"epoch": state.epoch, "lr": result.lr, **result.losses})
        self._scalars("val", metrics | losses)
        self._scalars("speed", speed)

        scores = map(coco_eval.format_metric, (metrics.get("AP"), metrics.get("AP50")))
        memory = f"{torch.cuda.max_memory_allocated() / 1e9:.1f}G" if torch.cuda.is_initialized() else "-"
        left = self.seconds / (state.epoch - self._first_epoch) * (self._epochs - state.epoch)  # evaluations included
        if state.epoch == self._first_epoch + 1:
            self._log.line(epoch_row(list(EPOCH_COLUMNS)))
        speeds = result.images_per_second, memory, progress.duration(seconds), progress.duration(left)
        row_of_epoch = epoch_row([f"{state.epoch}/{self._epochs}", *[*result.losses.values()][:4], *scores, *speeds])
        self._log.line(row_of_epoch + " *" * is_best)

    def pictures(self, pattern: str) -> None:
        """Log the pictures of the run folder that match, by their names there."""
        for path in sorted(self._folder.glob(pattern)):
            name = path.relative_to(self._folder).with_suffix("").as_posix()
            for thread in self._threads:
                thread.send("picture", self._state.step, name, path)

    def result(self) -> None:
        """Log the best epoch's metrics and the plots at the end of a training."""
        self._scalars("best", self._state.best_metrics)
        self.pictures("plots/*.[jp][pn]g")
        self._complete = True

    def close(self) -> None:
        """Let the services take what waits."""
        for thread in self._threads:
            thread.close(self._complete)

    def _scalars(self, group: str, metrics: Mapping[str, float]) -> None:
        present = {name: metric for name, metric in metrics.items() if metric != coco_eval.ABSENT}
        if present:
            for thread in self._threads:
                thread.send("scalars", self._state.step, group, present)


def own_id(folder: Path) -> str:
    """The id by which services find the run in ``folder`` again, from ``run_id.txt``."""
    path = folder / "run_id.txt"
    if not path.exists():
        with run_files.whole_file(path) as file:
            file.write(secrets.token_hex(6))
    return path.read_text()


def in_short(error: BaseException) -> str:
    """The kind of an error and its first sentence."""
    return f"{type(error).__name__}: {errors.first_line(error)}"[:200]
