"""Background checkpoint writes: training continues while a copy of the state is written."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from train_utils.errors import CheckpointError
from train_utils.run.checkpoint import save_checkpoint
from train_utils.run.plain_data import to_plain


class CheckpointWriter:
    """Write one checkpoint at a time in the background.

    Training continues after a failure. Of failures in a row only the first is reported.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._error: CheckpointError | None = None

    def write(self, state: dict[str, Any], targets: dict[Path, bool]) -> None:
        """Copy ``state`` and write it to all targets in turn, after any write still under way.

        ``targets`` maps each file to whether the previous one is kept. Raises CheckpointError at
        once if the state is not plain data.
        """
        copy: dict[str, Any] = to_plain(state, copied=True)
        self.wait()
        self._pending = self._pool.submit(_write, copy, targets)

    def failed(self) -> bool:
        """Whether the last write is over and failed."""
        if self._pending is not None and self._pending.done():
            self.wait()
        return self._error is not None

    def wait(self) -> None:
        """Wait for the write under way; report the first of failures in a row."""
        failed_before = self._error is not None
        self._settle()
        if self._error is not None and not failed_before:
            self._say(f"{self._error}. Training continues with the previous checkpoint and will try again")
        elif self._error is None and failed_before:
            self._say("checkpoints can be written again")

    def close(self) -> None:
        """End the thread. Raises CheckpointError if the last write failed."""
        self._settle()
        self._pool.shutdown()
        if self._error is not None:
            raise self._error

    def _settle(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        error = pending.exception()
        if error is not None and not isinstance(error, CheckpointError):
            raise error
        self._error = error


def _write(state: dict[str, Any], targets: dict[Path, bool]) -> None:
    for path, keep_previous in targets.items():
        save_checkpoint(path, state, keep_previous)
