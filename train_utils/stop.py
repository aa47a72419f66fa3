"""What all ranks decide together in every optimiser step, and the signals that ask for a stop.

A signal, a clock or a bad batch concerns one rank first. If it acted alone, its peers would wait in
a collective. So each step ends with one small exchange, and all ranks act alike.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

from train_utils.distributed import World, max_over_ranks
from train_utils.launch import is_lost_peer, requeue_file

NAMES = ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGHUP", "SIGINT")
STOP_SIGNALS = tuple(signal.Signals[name] for name in NAMES if hasattr(signal, name))
SECONDS_BEFORE_RETRY = 30.0  # after a checkpoint that could not be written


class StopRequest:
    """Whether a signal asked this process to stop.

    SLURM sends USR1 and TERM, submitit USR2, a closing terminal HUP (ignored under nohup), Ctrl-C
    INT. The context handles these signals while its body runs; outside the main thread it cannot.
    A handler only sets a flag. A second Ctrl-C ends the program at once. If the signal had a
    handler before, that one is called after the body: submitit's requeues its job, and Python's for
    Ctrl-C raises KeyboardInterrupt, with which programs exit with code 130.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if number.name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN:  # nohup has it ignored
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        around = self._before.get(self.signal) if self.signal is not None else None
        if kind is None and self.signal is not None and callable(around):
            signal.raise_signal(self.signal)
        if self.signal == signal.SIGTERM and is_lost_peer(error):
            signal.raise_signal(self.signal)  # a launcher ends all ranks, as one of them failed and said why

    def _handle(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal is not None:
            raise KeyboardInterrupt
        self.signal = self.signal or signal.Signals(number)


def ask_for_requeue(world: World, stopped_by: signal.Signals) -> None:
    """Ask the SLURM job script, through the file it named, to requeue; not after Ctrl-C.

    Call this last, when the checkpoint is on disk: the requeue ends the job.
    """
    path = requeue_file()
    if world.is_main and path is not None and stopped_by != signal.SIGINT:
        path.write_text(f"{stopped_by.name}\n", encoding="utf-8")


class Decision(NamedTuple):
    """What all ranks do about this step."""

    skip: bool  # leave out the update, because a loss or gradient of some rank is not finite
    stop: signal.Signals | None  # after this step, for this signal
    save: bool  # write a checkpoint after this step


class StepDecisions:
    """Finds the common decision of each step.

    ``save_every_steps`` and ``save_every_minutes`` space the checkpoints (0: no such rule).
    ``retry`` returns whether the last one could not be written.
    """

    def __init__(
        self, stop: StopRequest, save_every_steps: int, save_every_minutes: float, retry: Callable[[], bool]
    ) -> None:
        self._stop = stop
        self._every_steps, self._every_seconds = save_every_steps, 60 * save_every_minutes
        self._retry = retry
        self._last_save = time.monotonic()

    def saved(self) -> None:
        """Restart the clock: a checkpoint has just been queued."""
        self._last_save = time.monotonic()

    def decide(self, finite: bool, steps_done: int) -> Decision:
        """The decision about the step after which ``steps_done`` steps are done.

        All ranks call this together. ``finite``: loss and gradients of this rank are.
        """
        due = self._every_steps > 0 and steps_done % self._every_steps == 0
        skip, stop, save = max_over_ranks([not finite, self._stop.signal or 0, due or self._is_time()])
        return Decision(bool(skip), signal.Signals(stop) if stop else None, bool(save))

    def _is_time(self) -> bool:
        waited = time.monotonic() - self._last_save
        return (0 < self._every_seconds <= waited) or (waited > SECONDS_BEFORE_RETRY and self._retry())
