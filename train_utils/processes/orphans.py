"""A process whose launcher was killed must not go on unseen: nobody would restart it, stop it or know how it ended."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress

LOOK_SECONDS = 1.0
ORPHAN_SECONDS = 30.0  # to finish the step and write a checkpoint; 40 s after the death all is to be over


def watch_parent() -> threading.Thread:
    """From now on, end this process when its parent process dies: first as SIGTERM does, later at once.

    A training answers SIGTERM by a checkpoint and its end. One that hangs, or waits for a process that does, has no
    step to finish. The kernel's own signal (prctl) would come by Linux alone, and when a mere thread of the launcher
    ends; the number of the parent process changes on every POSIX system.
    """
    thread = threading.Thread(target=_watch, args=(os.getppid(),), name="parent watch", daemon=True)
    thread.start()
    return thread


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    with suppress(OSError):  # the launcher may have been the reader of a pipe
        print(
            f"the launcher (process {parent}) is gone: process {os.getpid()} stops after this step, and in "
            f"{ORPHAN_SECONDS:g} s at the latest",
            file=sys.stderr,
            flush=True,
        )
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)
