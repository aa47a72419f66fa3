"""Which nodes share a disk; threads play ranks, folders play the nodes' disks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from train_utils.errors import DistributedError
from train_utils.processes import zero_first
from train_utils.processes.shared_disks import find_builders
from train_utils.processes.world import World
from train_utils.processes.zero_first import leaders_first


def world(rank: int, num_nodes: int = 3) -> World:
    """One of two ranks on each node."""
    return World(rank, rank % 2, 2 * num_nodes, 2, rank // 2, num_nodes, torch.device("cpu"), "none", "gloo")


def builders(*folders_of_nodes: Sequence[Path]) -> list[int]:
    """What six ranks find if nodes see these folders; then all build, guarded."""
    shared, found, errors = dist.HashStore(), [list[int]()] * 6, list[BaseException]()

    def run(rank: int) -> None:
        me, folders = world(rank), folders_of_nodes[rank // 2]
        try:
            found[rank] = find_builders(shared, me, folders)
            with leaders_first(shared, me, found[rank]):
                leads = rank % 2 == 0 and found[rank][me.node_rank] == me.node_rank
                for built in (folder / "built" for folder in folders if folder.is_dir()):
                    assert leads or built.exists()
                    with built.open("a") as file:
                        file.write("x" if leads else "")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    assert found == [found[0]] * 6
    return found[0]


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_one_leader_for_one_shared_disk(tmp_path: Path) -> None:
    assert builders(*[[tmp_path]] * 3) == [0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["built"], "a probe was left"
    assert (tmp_path / "built").read_text() == "x", "more than one built"


def test_one_leader_on_each_node_without_a_shared_disk(tmp_path: Path) -> None:
    disks = [folder(tmp_path / str(node)) for node in range(3)]
    assert builders(*[[disk] for disk in disks]) == [0, 1, 2]
    assert all([path.name for path in disk.iterdir()] == ["built"] for disk in disks)


def test_two_of_three_nodes_share(tmp_path: Path) -> None:
    own, shared = folder(tmp_path / "own"), folder(tmp_path / "shared")
    assert builders([own], [shared], [shared]) == [0, 1, 1]
    # Nodes 0 and 2 share, node 1 stands between them.
    assert builders([folder(tmp_path / "a")], [folder(tmp_path / "b")], [tmp_path / "a"]) == [0, 1, 0]
    assert {path.read_text() for path in tmp_path.glob("*/built")} == {"x"}


def test_all_folders_must_be_shared(tmp_path: Path) -> None:
    """A shared index does not help a node whose pictures belong on its own disk."""
    index = folder(tmp_path / "index")
    roots = [folder(tmp_path / str(node)) for node in range(3)]
    assert builders(*[[index, root] for root in roots]) == [0, 1, 2]
    assert [path.name for path in index.iterdir()] == ["built"]


def test_a_folder_that_cannot_be_made_leaves_its_node_alone(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert builders([tmp_path / "new"], [blocked / "below"], [tmp_path / "new"]) == [0, 1, 0]


def test_a_node_that_never_looks_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_first, "DEAD_SECONDS", 0.2)
    with pytest.raises(DistributedError, match=rf"not all nodes looked at {tmp_path} within 0\.2 s\. fix: "):
        find_builders(dist.HashStore(), world(0), [tmp_path])
    assert list(tmp_path.iterdir()) == []


def test_one_node_needs_no_probe(tmp_path: Path) -> None:
    assert find_builders(dist.HashStore(), world(1, num_nodes=1), [tmp_path / "missing"]) == [0]
    assert list(tmp_path.iterdir()) == []
