"""What survivors say when another process is killed, hangs, or its machine is cut off: which ranks are missing.

Only a collective notices such a loss: its connection breaks, or its time-out runs out. What it then raises names an
address at best. So each process has a thread, the lookout, that watches the store of the group for the first process
that is to tell the user of an error, and answers to it. A process that was lost gives no answer. Who reports an error
of its own waits for the answers as well: then all know that the reason is told, even where the store ends with it.

The lookout alone uses its connection to the store. A request over a link that was cut may never return, so nobody
waits for it without a deadline.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from train_utils.errors import DistributedError
from train_utils.processes.meeting import Meeting, describe
from train_utils.processes.node_claim import NodeClaim
from train_utils.processes.store import Store, claim_report

LOOK_SECONDS, QUICK_LOOK_SECONDS = 1.0, 0.2  # between two looks at the store; the latter after an error
ANSWER_SECONDS = 4.0  # for the answers of those who live; a few looks
TELL_SECONDS = 14.0  # from the end of a collective's time-out to that of the process, at most
END_SECONDS = 12.0  # for a process to end by itself when another reports the error that ends the run
FIX = "fix: look at their output and their machines; a training goes on from its last checkpoint with resume=auto"


def collective_seconds(timeout_seconds: float) -> float:
    """The time-out of collectives with which a process that lost others has told it and ended within
    ``timeout_seconds``."""
    return max(timeout_seconds - TELL_SECONDS, timeout_seconds / 2)


class Lookout:
    """Watches the store of one start for this process, whose rank is ``rank``.

    ``store`` is a connection of its own, with keys of its own for each start; ``node`` settles who speaks where it is
    lost; ``place`` says where the store is ("10.0.0.1:29500") and whether it ends with rank 0; ``seconds`` is the
    time-out of collectives. ``end`` is called by the thread when the process did not end END_SECONDS after another had
    reported an error.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        meeting: Meeting,
        node: NodeClaim,
        place: str,
        rank_0_holds_it: bool,
        seconds: float,
        end: Callable[[], None] | None = None,  # end_now
    ) -> None:
        self._store, self._rank, self._meeting, self._seconds = store, rank, meeting, seconds
        self._node, self._place, self._rank_0_holds_it = node, place, rank_0_holds_it
        self._end = end or end_now
        self._reporter: int | None = None  # the rank that tells the user
        self._answered: set[int] = set()  # ranks that answered to it
        self._failed: set[int] = set()  # ranks that met an error as well
        self._raised = self._ended = False  # whether this process met an error, and went on without one to its end
        self._until: float | None = None  # when answers are waited for no longer
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="lookout", daemon=True)
        self._thread.start()
        # A thread that comes back from a request while the interpreter is taken down ends the process with SIGABRT.
        atexit.register(self.close)

    def close(self) -> None:
        """Watch no longer: this process ends, or leaves the group."""
        atexit.unregister(self.close)
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join(2 * LOOK_SECONDS)
        self._node.close()

    def claim(self) -> bool:
        """Whether this process is the one that tells the user of its error; the same answer on every call.

        Where the store is out of reach and nobody had told anything, it is the first of this node to ask. The process
        is to end afterwards: SIGTERM, by which a launcher ends the survivors, is too late to change that.
        """
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with self._changed:
            self._raised = True
            self._until = self._until or time.monotonic() + ANSWER_SECONDS
            self._changed.notify_all()
            self._wait(lambda: self._reporter is not None)
            if self._reporter is None:
                self._reporter = self._rank if self._node.is_first() else -1
            return self._reporter == self._rank

    def let_others_hear(self) -> None:
        """After ``claim``: wait until all who live know that the error is told, on the process that tells it and on
        rank 0, with which the store may end."""
        if self._counts(self._reporter):
            with self._changed:
                self._wait(lambda: len(self._answered) == len(self._meeting.members))

    def explain(self, error: BaseException, kinds: tuple[type[BaseException], ...]) -> BaseException:
        """DistributedError that names the missing ranks where ``error`` is a loss (see ``loss_in``), else ``error``."""
        reason = loss_in(error, kinds)
        if reason is None:
            return error
        if not self.claim():
            return DistributedError(f"lost another process ({reason}), as was reported")
        return DistributedError(self._name_missing(reason))

    def _name_missing(self, reason: str) -> str:
        with self._changed:
            self._wait(lambda: len(self._failed) == len(self._meeting.members))
            answered, failed = set(self._answered), set(self._failed)
        members, me = self._meeting.members, self._meeting.members[self._rank]
        if not answered and self._rank_0_holds_it and me.node_rank == members[0].node_rank:  # no link is cut in a node
            return f"lost {describe([0], members)}, which held the meeting point {self._place} ({reason}). {FIX}"
        if not answered:  # nobody can be asked
            elsewhere = [m.rank for m in members if m.node_rank != me.node_rank]
            others = elsewhere or [m.rank for m in members if m.rank != self._rank]
            return (
                f"{describe([self._rank], members)} can reach neither the meeting point {self._place} nor "
                f"{describe(others, members)} ({reason}). {FIX}"
            )
        missing = [m.rank for m in members if m.rank not in answered]
        if missing:
            return f"lost {describe(missing, members)}: no sign of life after a collective failed ({reason}). {FIX}"
        late = [m.rank for m in members if m.rank not in failed]
        if late:
            return (
                f"{describe(late, members)} did not come to a collective within {self._seconds:g} s, though alive "
                f"({reason}). fix: look at what hangs or is slow there, or set a longer train.timeout_seconds"
            )
        return f"{describe([self._rank], members)} lost its connection to another rank, which lives ({reason}). {FIX}"

    def _wait(self, condition: Callable[[], bool]) -> None:
        assert self._until is not None
        self._changed.wait_for(condition, max(0.0, self._until - time.monotonic()))

    def _run(self) -> None:
        """Look until the process ends. After the loss of the store, what is known of it stays as it is."""
        deadline = None
        with suppress(RuntimeError):
            while not self._ended:
                self._look()
                if self._reporter not in (None, self._rank):
                    deadline = deadline or time.monotonic() + END_SECONDS
                    if time.monotonic() > deadline:
                        self._end()
                with self._changed:
                    self._changed.notify_all()
                    self._changed.wait(QUICK_LOOK_SECONDS if self._raised else LOOK_SECONDS)

    def _look(self) -> None:
        """One look at the store: who reports an error, and who has answered or met one as well."""
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
            if self._reporter is None:  # it may have been settled meanwhile, without an answer from the store
                self._reporter = reporter
            self._answered, self._failed = answered, failed

    def _counts(self, reporter: int | None) -> bool:
        return reporter is not None and self._rank in (0, reporter)

    def _who(self, key: str) -> set[int]:
        ranks = range(len(self._meeting.members))
        if self._store.check([f"{key}/{rank}" for rank in ranks]):
            return set(ranks)
        return {rank for rank in ranks if self._store.check([f"{key}/{rank}"])}


def end_now() -> None:
    """End this process, wherever it hangs, and its loader workers, which may be why: one that is stopped or waits for a
    disk would stay behind."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)


def loss_in(error: BaseException | None, kinds: tuple[type[BaseException], ...]) -> str | None:
    """The first sentence about a lost connection or a time-out in ``error`` or its causes, None for any other error.

    ``kinds`` are torch's own classes for it; gloo raises RuntimeError, with the place in its source in front.
    """
    while error is not None:
        if isinstance(error, kinds) or (isinstance(error, RuntimeError) and "gloo/" in str(error).partition("\n")[0]):
            return first_line(error)
        error = error.__cause__
    return None


def first_line(error: BaseException) -> str:
    """The first sentence of ``error``, without the place in torch's source in front and its stack behind."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", line).split(". ")[0].rstrip(". ")
