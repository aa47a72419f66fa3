"""Connect to the rendezvous store, with a clear error for each step: resolve, listen, connect.

torch's store retries every failure alike until its time-out, twice, and prints a C++ stack. It
waits forever for another program that never answers.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from train_utils.errors import DistributedError

NAME_SECONDS = 5.0  # for a name server that says "try again"; an unknown name fails at once
PAUSE_SECONDS = 0.2  # between attempts to connect
POLL_SECONDS = 0.02  # between looks at a condition
BACKLOG = 4096  # pending connections, as in torch

Result = TypeVar("Result")


class Deadline:
    """A point in time ``seconds`` from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def is_over(self) -> bool:
        """Whether the time has passed."""
        return time.monotonic() >= self._end

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Poll until ``condition`` holds; False if it does not by the deadline."""
        while not condition():
            if self.is_over():
                return False
            time.sleep(POLL_SECONDS)
        return True


def resolve(address: str, port: int, rank: int, deadline: Deadline) -> list[str]:
    """The IP addresses of ``address``; DistributedError if it does not resolve."""
    patience = Deadline(min(NAME_SECONDS, deadline.left()))
    while True:
        try:
            return [str(found[4][0]) for found in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)]
        except (OSError, UnicodeError) as error:
            if not (isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN) or patience.is_over():
                raise DistributedError(
                    f"rank {rank} cannot resolve {address}, the host of rank 0 "
                    f"({getattr(error, 'strerror', None) or error}). fix: MASTER_ADDR=<a name or number that "
                    "this host knows>"
                ) from error
        time.sleep(PAUSE_SECONDS)


def listen(numbers: list[str], port: int, one_machine: bool) -> socket.socket:
    """Open the socket of the store on rank 0.

    It listens on all interfaces or, if all ranks are on ``one_machine``, on the address they use.
    Raises DistributedError if the port is taken or forbidden.
    """
    own = next((number for number in numbers if _is_own(number)), None) if one_machine else None
    family = socket.AF_INET6 if (":" in own if own else socket.has_dualstack_ipv6()) else socket.AF_INET
    try:
        if own is not None:
            return socket.create_server((own, port), family=family, backlog=BACKLOG)
        dual = family == socket.AF_INET6
        return socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=dual)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        reason = "another program uses it" if taken else error.strerror
        raise DistributedError(
            f"rank 0 cannot open port {port}, the rendezvous of all processes ({reason}). "
            "fix: MASTER_PORT=<a free port>, the same for all processes"
        ) from error


def wait_for_listener(address: str, port: int, rank: int, deadline: Deadline) -> None:
    """Wait until ``address`` accepts connections; DistributedError at the deadline."""
    while True:
        try:
            socket.create_connection((address, port), timeout=max(PAUSE_SECONDS, deadline.left())).close()
            return
        except OSError as error:
            if deadline.is_over():
                raise DistributedError(
                    f"rank {rank} found no process at {address}:{port} within {deadline.seconds:g} s "
                    f"({error.strerror or error}). fix: look for the first error in the output of rank 0, start it, "
                    "and give all processes its MASTER_ADDR and MASTER_PORT, open in every firewall between them"
                ) from error
        time.sleep(PAUSE_SECONDS)


def in_time(function: Callable[[], Result], deadline: Deadline) -> Result:
    """Call ``function`` in a thread; raise TimeoutError at the deadline and leave it running."""
    outcome: Future[Result] = Future()

    def call() -> None:
        try:
            outcome.set_result(function())
        except Exception as error:  # raised in the caller's thread
            outcome.set_exception(error)

    threading.Thread(target=call, name="join", daemon=True).start()
    return outcome.result(deadline.left() + PAUSE_SECONDS)


@contextmanager
def without_native_output() -> Iterator[None]:
    """Drop what C++ code writes to stderr in the body."""
    if sys.stderr is None:  # the process has no stderr
        yield
        return
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _is_own(number: str) -> bool:
    """Whether this machine has the address."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in number else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((number, 0))
            return True
    except OSError:
        return False
