"""Name the missing ranks when a process is killed, hangs, or loses its network.

Only a collective notices such a loss: its connection breaks or its time-out expires. The error then
names an address at best. So each rank runs a thread, the lookout. It watches the store for the
first rank that reports an error, and answers it. A lost rank does not answer. The reporting rank
waits for the answers: then every rank knows the error was reported, even if the store dies with it.

Only the lookout uses its connection to the store. A request over a cut link may never return, so
every wait for the lookout has a deadline.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from train_utils.errors import DistributedError, first_line
from train_utils.launch.environment import report_to_launcher
from train_utils.processes.rendezvous import Rendezvous, describe
from train_utils.processes.reporter_lock import ReporterLock
from train_utils.processes.store import Store, claim_report

LOOK_SECONDS, QUICK_LOOK_SECONDS = 1.0, 0.2  # polling interval; the quick one after an error
ANSWER_SECONDS = 4.0  # for live ranks to answer; a few polls
TELL_SECONDS = 14.0  # from a collective's time-out to the exit of the process, at most
END_SECONDS = 12.0  # for a rank to exit on its own after a peer reported an error
FIX = "fix: look at their output and their machines; resume=auto continues the training from its last checkpoint"


def collective_seconds(timeout_seconds: float) -> float:
    """Collective time-out that lets a rank report a loss and exit in ``timeout_seconds``."""
    return max(timeout_seconds - TELL_SECONDS, timeout_seconds / 2)


class Lookout:
    """Watches the store of one start on behalf of ``rank``.

    ``store`` is a separate connection, with separate keys for each start. ``lock`` decides who
    reports if the store is lost. ``store_name`` is for messages ("the store at 10.0.0.1:29500");
    ``rank_0_holds_it`` if it ends with rank 0. ``seconds`` is the collective time-out. The thread
    calls ``end`` if this process still runs END_SECONDS after a peer reported an error.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        rendezvous: Rendezvous,
        lock: ReporterLock,
        store_name: str,
        rank_0_holds_it: bool,
        seconds: float,
        end: Callable[[], None] | None = None,  # end_now
    ) -> None:
        self._store, self._rank, self._rendezvous, self._seconds = store, rank, rendezvous, seconds
        self._lock, self._store_name, self._rank_0_holds_it = lock, store_name, rank_0_holds_it
        self._end = end or end_now
        self._reporter: int | None = None  # the rank that reports the error
        self._answered: set[int] = set()  # ranks that answered it
        self._failed: set[int] = set()  # ranks that hit an error too
        self._raised = self._ended = False  # this rank hit an error; this rank is done
        self._until: float | None = None  # when to stop waiting for answers
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="lookout", daemon=True)
        self._thread.start()
        # A thread that returns from a request during interpreter shutdown aborts the process.
        atexit.register(self.close)

    def close(self) -> None:
        """Stop watching, because this process exits or leaves the group."""
        atexit.unregister(self.close)
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join(2 * LOOK_SECONDS)
        self._lock.close()

    def claim(self) -> bool:
        """Whether this rank reports its error to the user; every call gives the same answer.

        If the store is out of reach and nobody has reported, the first rank of this node to ask
        does. The process must exit afterwards, so SIGTERM, which launchers send to survivors, is
        ignored from here on.
        """
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with self._changed:
            self._raised = True
            self._until = self._until or time.monotonic() + ANSWER_SECONDS
            self._changed.notify_all()
            self._wait(lambda: self._reporter is not None)
            if self._reporter is None:
                self._reporter = self._rank if self._lock.is_first() else -1
            return self._reporter == self._rank

    def let_others_hear(self) -> None:
        """After ``claim``: wait until all live ranks know that the error was reported.

        Only the reporting rank waits, and rank 0, because the store may end with it.
        """
        if self._counts(self._reporter):
            with self._changed:
                self._wait(lambda: len(self._answered) == len(self._rendezvous.peers))

    def explain(self, error: BaseException, kinds: tuple[type[BaseException], ...]) -> BaseException:
        """Turn a loss (see ``loss_in``) into an error that names the ranks; return others as is."""
        reason = loss_in(error, kinds)
        return error if reason is None else DistributedError(self._sentence(reason))

    @property
    def peer_reports(self) -> bool:
        """Whether another rank reported an error; this process ends within END_SECONDS then."""
        return self._reporter not in (None, self._rank)

    def ends_within(self, seconds: float) -> bool:
        """Wait ``seconds`` at most until this rank asks who reports its error, or leaves."""
        with self._changed:
            return self._changed.wait_for(lambda: self._raised or self._ended, seconds)

    def report_and_end(self, reason: str) -> None:
        """Report a loss for the main thread, which hangs, and end the process."""
        sentence = f"error: {self._sentence(reason)}"
        if not self.peer_reports:
            print(sentence, file=sys.stderr, flush=True)
        report_to_launcher(sentence)
        self.let_others_hear()
        self._end()

    def _sentence(self, reason: str) -> str:
        return self._name_missing(reason) if self.claim() else f"lost another process ({reason}), as was reported"

    def _name_missing(self, reason: str) -> str:
        with self._changed:
            self._wait(lambda: len(self._failed) == len(self._rendezvous.peers))
            answered, failed = set(self._answered), set(self._failed)
        peers, me = self._rendezvous.peers, self._rendezvous.peers[self._rank]
        if not answered and self._rank_0_holds_it and me.node_rank == peers[0].node_rank:  # no link is cut in a node
            return f"lost {describe([0], peers)}, which held {self._store_name} ({reason}). {FIX}"
        if not answered:  # the store is out of reach
            elsewhere = [peer.rank for peer in peers if peer.node_rank != me.node_rank]
            others = elsewhere or [peer.rank for peer in peers if peer.rank != self._rank]
            return (
                f"{describe([self._rank], peers)} can reach neither {self._store_name} nor "
                f"{describe(others, peers)} ({reason}). {FIX}"
            )
        missing = [peer.rank for peer in peers if peer.rank not in answered]
        if missing:
            return f"lost {describe(missing, peers)}: no sign of life after a collective failed ({reason}). {FIX}"
        late = [peer.rank for peer in peers if peer.rank not in failed]
        if late:
            return (
                f"{describe(late, peers)} did not come to a collective within {self._seconds:g} s, though alive "
                f"({reason}). fix: look at what hangs or is slow there, or set a longer train.timeout_seconds"
            )
        return f"{describe([self._rank], peers)} lost its connection to another rank, which lives ({reason}). {FIX}"

    def _wait(self, condition: Callable[[], bool]) -> None:
        assert self._until is not None
        self._changed.wait_for(condition, max(0.0, self._until - time.monotonic()))

    def _run(self) -> None:
        """Poll until the process ends; once the store is lost, keep the last state."""
        deadline = None
        with suppress(RuntimeError):
            while not self._ended:
                self._look()
                if self.peer_reports:
                    deadline = deadline or time.monotonic() + END_SECONDS
                    if time.monotonic() > deadline:
                        self._end()
                with self._changed:
                    self._changed.notify_all()
                    self._changed.wait(QUICK_LOOK_SECONDS if self._raised else LOOK_SECONDS)

    def _look(self) -> None:
        """Poll the store once: who reports an error, who answered, who hit an error too."""
        raised, reporter = self._raised, self._reporter
        if raised:
            claim_report(self._store, self._rank)
            self._store.compare_set(f"failed/{self._rank}", "", "yes")
        if reporter is None and self._store.check(["reporter"]):
            reporter = int(self._store.get("reporter"))
            self._store.compare_set(f"answered/{self._rank}", "", "yes")
        answered = self._who("answered") if self._counts(reporter) else set()
        failed = self._who("failed") if self._counts(reporter) else set()
        with self._changed:
            if self._reporter is None:  # ``claim`` may have decided it meanwhile without the store
                self._reporter = reporter
            self._answered, self._failed = answered, failed

    def _counts(self, reporter: int | None) -> bool:
        return reporter is not None and self._rank in (0, reporter)

    def _who(self, key: str) -> set[int]:
        ranks = range(len(self._rendezvous.peers))
        if self._store.check([f"{key}/{rank}" for rank in ranks]):
            return set(ranks)
        return {rank for rank in ranks if self._store.check([f"{key}/{rank}"])}


def end_now() -> None:
    """Kill this process wherever it hangs, and its loader workers, which would stay behind."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)


def loss_in(error: BaseException | None, kinds: tuple[type[BaseException], ...]) -> str | None:
    """First sentence about a lost connection or time-out in ``error`` or its causes, or None.

    ``kinds`` are torch's classes for it. gloo raises RuntimeError that starts with a source line.
    """
    while error is not None:
        if isinstance(error, kinds) or (isinstance(error, RuntimeError) and "gloo/" in str(error).partition("\n")[0]):
            return first_line(error)
        error = error.__cause__
    return None
