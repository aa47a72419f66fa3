"""A logger in a thread of its own: it can fail or hang, and the training goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Empty, Full, Queue
from threading import Event, Thread

from train_utils.errors import TrainError
from train_utils.loggers.interface import Logger

START_SECONDS = 60  # the training waits this long for a service, then starts without its answer
MOST_WAITING = 10_000  # messages

Message = Callable[[Logger], None]


class Background:
    """Starts a logger and hands it messages; warns once if it fails or falls behind.

    Only ``name``'s own thread touches the logger, only the caller's thread writes warnings.
    """

    def __init__(self, name: str, start: Callable[[], Logger], warn: Callable[[str], None]) -> None:
        self._name, self._start, self._warn = name, start, warn
        self._messages: Queue[Message | None] = Queue(MOST_WAITING)
        self._failure: Exception | None = None
        self._started, self._warned = Event(), False
        self._thread = Thread(target=self._work, name=f"logger-{name}", daemon=True)  # a hung one must not hold us
        self._thread.start()

    def wait_for_start(self, must: bool) -> None:
        """Wait until the logger has started, at most START_SECONDS.

        Raises TrainError if it cannot start and ``must``; else warns.
        """
        if not self._started.wait(START_SECONDS):
            self._warn(f"warning: logger={self._name} has not started within {START_SECONDS} s: the training goes on")
        elif must and self._failure is not None:
            self._warned = True  # the error says it
            if isinstance(self._failure, TrainError):
                raise self._failure
            raise TrainError(
                f"logger={self._name} cannot start ({_in_short(self._failure)}). fix: that, or leave {self._name} out"
            ) from self._failure
        self._tell()

    def send(self, message: Message) -> None:
        """Queue a message; never waits."""
        try:
            self._messages.put_nowait(message)
        except Full:
            self._warn_once("is far behind: figures are left out")
        self._tell()

    def end(self) -> None:
        """Ask the thread to end after the messages that wait; without delay."""
        while True:
            try:
                return self._messages.put_nowait(None)
            except Full:
                try:
                    self._messages.get_nowait()
                except Empty:
                    continue  # the thread took it

    def join(self, deadline: float) -> None:
        """Wait for that until ``deadline`` (time.monotonic) and warn if it is not done."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self._tell()
        if self._thread.is_alive():
            self._warn_once("did not take everything in time: the end of the run may be missing there")

    def _work(self) -> None:
        logger: Logger | None = None
        try:
            logger = self._start()
        except Exception as error:  # of somebody else's client: of any kind
            self._failure = error
        self._started.set()
        while (message := self._messages.get()) is not None:
            if logger is not None:
                try:
                    message(logger)
                except Exception as error:  # as above
                    self._failure = self._failure or error

    def _tell(self) -> None:
        if self._failure is not None:
            self._warn_once(f"failed ({_in_short(self._failure)}): the training goes on, figures may be missing there")

    def _warn_once(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"warning: logger={self._name} {text}")


def _in_short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
