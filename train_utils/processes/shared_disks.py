"""Find out with probe files which nodes share a disk, so one rank builds once for each disk.

Host names and ranks cannot tell: nodes may share a home folder and yet each have a scratch disk
under the same path.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from train_utils.errors import DistributedError
from train_utils.processes import zero_first
from train_utils.processes.connect import Deadline
from train_utils.processes.store import Store, lost_store_as_error
from train_utils.processes.world import World


def find_builders(store: Store, world: World, folders: Sequence[Path]) -> list[int]:
    """For each node the first node that sees the same ``folders``, which builds for it.

    A node that cannot write to a folder builds for itself; the error follows when it builds there.
    All ranks must call this in the same order. Raises DistributedError if a node does not answer
    for zero_first.DEAD_SECONDS.
    """
    nodes, own = range(world.num_nodes), world.node_rank
    if len(nodes) == 1 or not folders:
        return list(nodes)
    with lost_store_as_error():
        section = f"disks/{store.add(f'disks/entered/{world.rank}', 1)}"
        token = store.compare_set(f"{section}/token", "", uuid.uuid4().hex).decode()
        answers = [f"{section}/first/{node}" for node in nodes]
        if world.is_local_main:
            with probes(folders, token, own):
                store.add(f"{section}/made", 1)
                _wait(lambda: store.add(f"{section}/made", 0) == len(nodes), folders)
                store.compare_set(answers[own], "", str(first_seen(folders, token, own)))
                _wait(lambda: store.check(answers), folders)  # keep the files until every node has looked
        _wait(lambda: store.check(answers), folders)
        return [int(store.get(answer)) for answer in answers]


def first_seen(folders: Sequence[Path], token: str, own: int) -> int:
    """The first node whose probes are visible in all folders; else node ``own``."""
    seen = (node for node in range(own) if all((folder / _name(token, node)).exists() for folder in folders))
    return next(seen, own)


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


def _wait(condition: Callable[[], bool], folders: Iterable[Path]) -> None:
    seconds = zero_first.DEAD_SECONDS
    if not Deadline(seconds).wait_for(condition):
        raise DistributedError(
            f"not all nodes looked at {', '.join(map(str, folders))} within {seconds:g} s. fix: look for the first "
            "error in the output of all ranks, and whether that disk answers on every node"
        )
