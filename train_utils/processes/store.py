"""What ranks exchange through the group's key-value store instead of collectives and time-outs.

The functions take any object with the methods of ``Store``. If the store is gone, every method
raises RuntimeError (torch's DistError is one), which becomes DistributedError here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from train_utils.errors import DistributedError, SharedError
from train_utils.processes.reaching import Deadline

BEAT_SECONDS = 5.0  # between heartbeats of a leader
DEAD_SECONDS = 60.0  # without a heartbeat; allows for a long C call
LINGER_SECONDS = 3.0  # rank 0 stays after a failure: peers read of it in its store
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.02, 0.5  # between polls


class Store(Protocol):
    """The part of torch.distributed.Store in use; every method is atomic across ranks."""

    def add(self, key: str, value: int, /) -> int:
        """Add to a counter that starts at 0 and return the new count."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are set."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set ``key`` if it holds ``expected`` ("": or is unset); return its current value."""

    def get(self, key: str, /) -> bytes:
        """Wait for ``key`` and return its value."""


@dataclass(frozen=True)
class Place:
    """A rank's position among nodes or groups of nodes; local rank 0 leads its node."""

    rank: int
    world_size: int
    node_rank: int
    num_nodes: int
    leads: bool
    led_by: tuple[int, ...] = ()  # the first node of each group

    def node(self, group: int) -> int:
        """The node whose local rank 0 leads the group."""
        return self.led_by[group] if self.led_by else group


@contextmanager
def lost_store_as_error() -> Iterator[None]:
    """Turn the loss of the store, and of the rank that holds it, into DistributedError."""
    try:
        yield
    except DistributedError:
        raise
    except RuntimeError as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise DistributedError(
            f"lost the other processes ({first_line}). fix: look for the first error in the output of all of them"
        ) from error


def agree(store: Store, rank: int, world_size: int, leads: bool, problem: str | None, deadline: Deadline) -> int:
    """Wait until all ranks are here and return the number of nodes, i.e. of ranks that lead one.

    If any rank passes a ``problem``, all ranks raise SharedError with the first one. Raises
    DistributedError at the deadline.
    """
    with lost_store_as_error():
        if leads:
            store.add("agree/nodes", 1)
        if problem is not None:
            store.compare_set("agree/problem", "", problem)
        here = store.add("agree/here", 1)
        while here < world_size:
            if deadline.is_over():
                raise DistributedError(
                    f"only {here} of {world_size} processes were ready within {deadline.seconds:g} s. fix: look for "
                    "the first error in the output of all of them"
                )
            time.sleep(FIRST_PAUSE_SECONDS)
            here = store.add("agree/here", 0)
        if store.check(["agree/problem"]):
            sentence = store.get("agree/problem").decode()
            linger(store, "agree/heard", rank, world_size)
            raise SharedError(sentence)
        return store.add("agree/nodes", 0)


def claim_report(store: Store, rank: int) -> bool:
    """Whether ``rank`` reports the error to the user: the first rank to ask does."""
    return store.compare_set("reporter", "", str(rank)).decode() == str(rank)


@contextmanager
def leaders_first(store: Store, place: Place) -> Iterator[None]:
    """Run the body on leaders, then on others; see distributed.torch_distributed_zero_first."""
    with lost_store_as_error():
        section = f"leaders/{store.add(f'leaders/entered/{place.rank}', 1)}"  # every rank counts its own entries
    if not place.leads:
        _wait_for_leaders(store, section, place)
        yield
        return
    with _heartbeat(store, f"{section}/beat/{place.node_rank}"):
        try:
            yield
        except BaseException as error:  # Ctrl-C too: peers must not wait for a leader that exits
            with suppress(RuntimeError):  # the store is lost; the original error matters more
                claim_report(store, place.rank)  # before its peers wake: this rank has the traceback
                sentence = f"{error} ({type(error).__name__} on rank {place.rank})"
                store.compare_set(f"{section}/failure", "", sentence)
                linger(store, f"{section}/heard", place.rank, place.world_size)
            raise
        with lost_store_as_error():
            store.add(f"{section}/done", 1)
        _wait_for_leaders(store, section, place)  # still beating: followers wait for other nodes too


@contextmanager
def _heartbeat(store: Store, key: str) -> Iterator[None]:
    """Increment ``key`` every BEAT_SECONDS in a thread while the body runs."""
    stopped = threading.Event()

    def beat() -> None:
        with suppress(RuntimeError):  # the store is lost; nobody watches
            while not stopped.wait(BEAT_SECONDS):
                store.add(key, 1)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _wait_for_leaders(store: Store, section: str, place: Place) -> None:
    """Wait until all leaders are done; raise DistributedError if one failed or died."""
    # Followers watch their own leader, leaders the next node's, so every leader is watched.
    watched = (place.node_rank + int(place.leads)) % place.num_nodes
    beats, last_change, pause = -1, time.monotonic(), FIRST_PAUSE_SECONDS
    with lost_store_as_error():
        while not store.check([f"{section}/failure"]):
            if store.add(f"{section}/done", 0) == place.num_nodes:
                return
            now, seen = time.monotonic(), store.add(f"{section}/beat/{watched}", 0)
            if seen != beats:
                beats, last_change = seen, now
            elif now - last_change > DEAD_SECONDS:
                sentence = (
                    f"the first process of node {place.node(watched)} gave no sign of life for {DEAD_SECONDS:g} s "
                    "while others waited for it. fix: look at its output, and for a lack of memory on its node"
                )
                store.compare_set(f"{section}/failure", "", sentence)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        sentence = store.get(f"{section}/failure").decode()
        linger(store, f"{section}/heard", place.rank, place.world_size)
        raise DistributedError(sentence)


def linger(store: Store, key: str, rank: int, world_size: int) -> None:
    """Call after reading of a failure: keeps rank 0, and so its store, until all ranks have."""
    heard, deadline = store.add(key, 1), time.monotonic() + LINGER_SECONDS
    while rank == 0 and heard < world_size and time.monotonic() < deadline:
        time.sleep(FIRST_PAUSE_SECONDS)
        heard = store.add(key, 0)
