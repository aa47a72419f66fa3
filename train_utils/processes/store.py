"""What ranks exchange through the group's key-value store instead of collectives and time-outs.

The functions take any object with the methods of ``Store``. If the store is gone, every method
raises RuntimeError (torch's DistError is one), which becomes DistributedError here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from train_utils.errors import DistributedError, SharedError, first_line
from train_utils.processes.connect import Deadline

LINGER_SECONDS = 3.0  # rank 0 stays after a failure: peers read of it in its store


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


@contextmanager
def lost_store_as_error() -> Iterator[None]:
    """Turn the loss of the store, and of the rank that holds it, into DistributedError."""
    try:
        yield
    except DistributedError:
        raise
    except RuntimeError as error:
        raise DistributedError(
            f"lost the other processes ({first_line(error)}). fix: look for the first error in the output of all of "
            "them"
        ) from error


def agree(store: Store, rank: int, world_size: int, leads: bool, problem: str | None, deadline: Deadline) -> int:
    """Wait until all ranks are here; return the number of nodes, i.e. of ranks that lead one.

    If any rank passes a ``problem``, all ranks raise SharedError with the first one. Raises
    DistributedError at the deadline.
    """
    with lost_store_as_error():
        if leads:
            store.add("agree/nodes", 1)
        if problem is not None:
            store.compare_set("agree/problem", "", problem)
        store.add("agree/here", 1)
        if not deadline.wait_for(lambda: store.add("agree/here", 0) >= world_size):
            raise DistributedError(
                f"only {store.add('agree/here', 0)} of {world_size} ranks were ready within {deadline.seconds:g} s. "
                "fix: look for the first error in the output of all of them"
            )
        if store.check(["agree/problem"]):
            sentence = store.get("agree/problem").decode()
            linger(store, "agree/heard", rank, world_size)
            raise SharedError(sentence)
        return store.add("agree/nodes", 0)


def claim_report(store: Store, rank: int) -> bool:
    """Whether ``rank`` reports the error to the user: the first rank to ask does."""
    return store.compare_set("reporter", "", str(rank)).decode() == str(rank)


def linger(store: Store, key: str, rank: int, world_size: int) -> None:
    """Call after reading of a failure: keeps rank 0, and so its store, until all ranks have."""
    store.add(key, 1)
    if rank == 0:
        Deadline(LINGER_SECONDS).wait_for(lambda: store.add(key, 0) >= world_size)
