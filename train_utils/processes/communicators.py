"""End a wait for the device whose peer is lost, so that this rank can say so.

gloo raises an error in the rank that waits. Under NCCL the device waits, the main thread waits for
its device, and no error arrives. So a thread asks NCCL whether a collective failed and aborts it.
The main thread goes on, and its next exchange raises the error. If it does not go on, the thread
reports in its place.
"""

from __future__ import annotations

import atexit
import signal
import threading
from typing import Protocol

from train_utils.processes import lost_peers
from train_utils.processes.lost_peers import Lookout

FREE_SECONDS = 4.0  # for the main thread to leave its wait after the abort


class CollectiveError(RuntimeError):
    """A collective of the devices failed or was aborted: what it computed is undefined."""


class Communicators(Protocol):
    """What the devices of all ranks exchange through."""

    def failure(self) -> str | None:
        """Why they no longer work; None: they do."""

    def abort(self) -> None:
        """End what waits for them on the device. It may hang."""


class CommunicatorWatch:
    """Watches ``communicators`` on behalf of ``lookout`` until this rank raises an error or ends.

    They are aborted when they fail, and when a peer reports an error, for which this rank must end.
    """

    def __init__(self, communicators: Communicators, lookout: Lookout) -> None:
        self._communicators, self._lookout = communicators, lookout
        self._aborted: str | None = None  # for this reason
        # Not the lookout's own thread, which may hang in a request to the store.
        self._thread = threading.Thread(target=self._run, name="communicators", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise CollectiveError if the communicators failed.

        Each exchange of the ranks asks this first, so that undefined numbers get no further.
        """
        reason = self._aborted or self._communicators.failure()
        if reason is not None:
            raise CollectiveError(reason)

    def close(self) -> None:
        """Wait for the thread, after the lookout was closed."""
        self._thread.join(2 * lost_peers.LOOK_SECONDS)

    def _run(self) -> None:
        while (failure := self._communicators.failure()) is None and not self._lookout.peer_reports:
            if self._lookout.ends_within(lost_peers.LOOK_SECONDS):
                return
        self._aborted = failure or "another process reported an error"  # the freed main thread asks for it
        # The exit of the process, too, could wait for a device that does not answer.
        atexit.register(signal.alarm, round(lost_peers.END_SECONDS))
        threading.Thread(target=self._communicators.abort, name="abort", daemon=True).start()
        if not self._lookout.ends_within(FREE_SECONDS) and not self._lookout.peer_reports:
            self._lookout.report_and_end(self._aborted)
