"""The services that a run logs to, on rank 0: none can end or delay it.

A service, here or in a plugin, is a class made from a LoggedRun, called and closed in one separate
thread. It has the methods of TensorBoardLogger; they may raise any exception.
"""

import queue
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import yaml

from conf import TrainError, first_line
from conf.cli import run_files
from data.progress import LogLine


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


SERVICES = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger}
LOGGERS: dict[str, Callable[[LoggedRun], Any]] = {}  # of the plugins in use, by name
END_SECONDS = 20.0  # that the end of a training waits for each logger


class LoggerThread(threading.Thread):
    """Calls a logger in a thread that Python does not wait for: a failure is one warning."""

    def __init__(self, name: str, logger: Any, log_line: LogLine) -> None:
        super().__init__(name=f"logger={name}", daemon=True)
        self._logger = logger
        self._log_line = log_line
        self._has_warned = False
        self._messages = queue.SimpleQueue[tuple[Any, ...]]()  # a method and its arguments
        self.start()

    def send(self, method: str, *content: Any) -> None:
        """Queue a call of the logger's ``method``; never waits."""
        self._messages.put((method, *content))

    def close(self, complete: bool) -> None:
        """Let the logger take what waits and close, for END_SECONDS at most."""
        self.send("close", complete)
        self.join(END_SECONDS)
        if self.is_alive():
            self._warn("does not answer")

    def run(self) -> None:
        """Pass the messages on, until it is closed."""
        method = ""
        while method != "close":
            method, *content = self._messages.get()
            try:
                getattr(self._logger, method)(*content)
            except Exception as error:  # of somebody else's client: of any kind
                self._warn(f"failed ({in_short(error)})")

    def _warn(self, failure: str) -> None:
        if not self._has_warned:
            self._log_line(f"warning: {self.name} {failure}: training is not affected; metrics may be missing there")
        self._has_warned = True


def start_services(
    names: Sequence[str], folder: Path, step: int, options: dict[str, Any], log_line: LogLine
) -> list[LoggerThread]:
    """Start these services and the loggers of plugins, a thread each.

    They find a resumed run again by the id in ``run_id.txt``. If one cannot start, a new run raises
    TrainError; a resumed one logs a warning.
    """
    path = folder / "run_id.txt"
    if not path.exists():
        with run_files.whole_file(path) as file:
            file.write(secrets.token_hex(6))
    run, started = LoggedRun(folder, path.read_text(), step, options), []
    for name in [*names, *LOGGERS]:
        try:
            started.append(LoggerThread(name, (LOGGERS | SERVICES)[name](run), log_line))
        except Exception as error:  # of somebody else's client: of any kind
            reason = f"logger={name} cannot start ({in_short(error)})"
            if step == 0:
                raise TrainError(reason, f"mend the cause, or leave {name} out") from error
            log_line(f"warning: {reason}: training is not affected; metrics are missing there")
    return started


def in_short(error: BaseException) -> str:
    """The kind of an error and its first sentence."""
    return f"{type(error).__name__}: {first_line(error)}"[:200]
