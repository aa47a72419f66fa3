"""One rank builds, the others open what it built; see distributed.torch_distributed_zero_first.

Ranks wait on the store, not in a collective with its time-out, so building may take hours. A leader
is local rank 0 of a node that builds. ``builders[node]`` is the node that builds for ``node``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from train_utils.errors import DistributedError
from train_utils.processes.connect import POLL_SECONDS
from train_utils.processes.store import Store, claim_report, linger, lost_store_as_error
from train_utils.processes.world import World

BEAT_SECONDS = 5.0  # between heartbeats of a leader
DEAD_SECONDS = 60.0  # without a heartbeat; allows for a long C call
LONGEST_PAUSE_SECONDS = 0.5  # between looks at the store; the first is POLL_SECONDS


@contextmanager
def leaders_first(store: Store, world: World, builders: Sequence[int]) -> Iterator[None]:
    """Run the body on the leaders, then on the other ranks."""
    with lost_store_as_error():
        section = f"leaders/{store.add(f'leaders/entered/{world.rank}', 1)}"  # every rank counts its own entries
    if not (world.is_local_main and builders[world.node_rank] == world.node_rank):
        _wait_for_leaders(store, section, world, builders, builders[world.node_rank])
        yield
        return
    leading = sorted(set(builders))
    watched = leading[(leading.index(world.node_rank) + 1) % len(leading)]  # so that every leader is watched
    with _heartbeat(store, f"{section}/beat/{world.node_rank}"):
        try:
            yield
        except BaseException as error:  # Ctrl-C too: peers must not wait for a leader that exits
            with suppress(RuntimeError):  # the store is lost; the original error matters more
                claim_report(store, world.rank)  # before its peers wake: this rank has the traceback
                sentence = f"{error} ({type(error).__name__} on rank {world.rank})"
                store.compare_set(f"{section}/failure", "", sentence)
                linger(store, f"{section}/heard", world.rank, world.world_size)
            raise
        with lost_store_as_error():
            store.add(f"{section}/done", 1)
        _wait_for_leaders(store, section, world, builders, watched)  # still beating: its followers wait, too


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


def _wait_for_leaders(store: Store, section: str, world: World, builders: Sequence[int], watched: int) -> None:
    """Wait until all leaders are done; raise DistributedError if one failed or died.

    This rank watches the heartbeat of node ``watched``.
    """
    beats, last_change, pause = -1, time.monotonic(), POLL_SECONDS
    with lost_store_as_error():
        while not store.check([f"{section}/failure"]):
            if store.add(f"{section}/done", 0) == len(set(builders)):
                return
            now, seen = time.monotonic(), store.add(f"{section}/beat/{watched}", 0)
            if seen != beats:
                beats, last_change = seen, now
            elif now - last_change > DEAD_SECONDS:
                sentence = (
                    f"local rank 0 of node {watched} gave no sign of life for {DEAD_SECONDS:g} s while others waited "
                    "for it. fix: look at its output, and for a lack of memory on its node"
                )
                store.compare_set(f"{section}/failure", "", sentence)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        sentence = store.get(f"{section}/failure").decode()
        linger(store, f"{section}/heard", world.rank, world.world_size)
        raise DistributedError(sentence)
