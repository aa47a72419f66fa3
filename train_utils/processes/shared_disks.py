"""Find out with probe files which nodes share a disk, so one rank builds once for each disk.

Host names and ranks cannot tell: nodes may share a home folder and yet each have a scratch disk
under the same path.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from train_utils.errors import DistributedError
from train_utils.processes import store
from train_utils.processes.store import Place, Store


def place_on_disk(channel: Store, place: Place, folders: Sequence[Path]) -> Place:
    """``place`` with nodes merged into groups that see the same ``folders``; one leader each.

    A node that cannot write to a folder stays alone; the error follows when it builds there. All
    ranks must call this in the same order. Raises DistributedError if a leader does not answer for
    store.DEAD_SECONDS.
    """
    if place.num_nodes == 1 or not folders:
        return place
    with store.lost_store_as_error():
        section = f"disks/{channel.add(f'disks/entered/{place.rank}', 1)}"
        token = channel.compare_set(f"{section}/token", "", uuid.uuid4().hex).decode()
        answers = [f"{section}/first/{node}" for node in range(place.num_nodes)]
        if place.leads:
            with probes(folders, token, place.node_rank):
                channel.add(f"{section}/made", 1)
                _wait(lambda: channel.add(f"{section}/made", 0) == place.num_nodes, folders)
                channel.compare_set(answers[place.node_rank], "", str(first_seen(folders, token, place)))
                _wait(lambda: channel.check(answers), folders)  # keep the files until every leader has looked
        _wait(lambda: channel.check(answers), folders)
        firsts = [int(channel.get(answer)) for answer in answers]
    groups, first = sorted(set(firsts)), firsts[place.node_rank]
    leads = place.leads and first == place.node_rank
    return replace(place, node_rank=groups.index(first), num_nodes=len(groups), leads=leads, led_by=tuple(groups))


def first_seen(folders: Sequence[Path], token: str, place: Place) -> int:
    """The first node whose probes are visible in all folders; else this node."""
    for node in range(place.node_rank):
        if all((folder / _name(token, node)).exists() for folder in folders):
            return node
    return place.node_rank


@contextmanager
def probes(folders: Sequence[Path], token: str, node: int) -> Iterator[None]:
    """Keep an empty file in each writable folder while the body runs."""
    paths = [folder / _name(token, node) for folder in folders]
    for path in paths:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    try:
        yield
    finally:
        for path in paths:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _name(token: str, node: int) -> str:
    return f".shared-{token}-{node}"  # a new name, so no file system has cached its absence


def _wait(is_over: Callable[[], bool], folders: Iterable[Path]) -> None:
    deadline, pause = time.monotonic() + store.DEAD_SECONDS, store.FIRST_PAUSE_SECONDS
    while not is_over():
        if time.monotonic() > deadline:
            raise DistributedError(
                f"not all nodes looked at {', '.join(map(str, folders))} within {store.DEAD_SECONDS:g} s. fix: look "
                "for the first error in the output of all processes, and whether that disk answers on every node"
            )
        time.sleep(pause)
        pause = min(2 * pause, store.LONGEST_PAUSE_SECONDS)
