"""End a process whose launcher was killed: nobody could stop, restart or observe it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress

LOOK_SECONDS = 1.0
ORPHAN_SECONDS = 30.0  # to finish the step and write a checkpoint


def watch_parent(parent: int) -> threading.Thread:
    """End this process without its ``parent``: by SIGTERM first, after ORPHAN_SECONDS at once.

    A training answers SIGTERM with a checkpoint and exits; one that hangs cannot. The kernel's own
    signal (prctl) exists on Linux only and fires when a mere thread of the launcher ends. The
    parent's process id changes on every POSIX system.
    """
    thread = threading.Thread(target=_watch, args=(parent,), name="parent watch", daemon=True)
    thread.start()
    return thread


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    with suppress(OSError):  # stderr may be a pipe that the launcher read
        print(
            f"the launcher (process {parent}) is gone: process {os.getpid()} stops after this step, and in "
            f"{ORPHAN_SECONDS:g} s at the latest",
            file=sys.stderr,
            flush=True,
        )
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)
