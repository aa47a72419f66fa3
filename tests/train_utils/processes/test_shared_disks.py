"""Which nodes share a disk; threads play ranks, folders play the nodes' disks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from train_utils.errors import DistributedError
from train_utils.processes import store
from train_utils.processes.shared_disks import place_on_disk
from train_utils.processes.store import Place, leaders_first

NODES = (0, 0, 1, 1, 2, 2)  # of six ranks


def places_of(*folders_of_nodes: list[Path]) -> list[Place]:
    """What each of six ranks learns if nodes see these folders; then all build, guarded."""
    shared, found, errors = dist.HashStore(), dict[int, Place](), list[BaseException]()

    def run(rank: int) -> None:
        place = Place(rank, 6, NODES[rank], 3, leads=rank % 2 == 0)
        try:
            place = place_on_disk(shared, place, folders_of_nodes[NODES[rank]])
            with leaders_first(shared, place):
                for folder in folders_of_nodes[NODES[rank]]:
                    built = folder / "built"
                    assert place.leads or built.exists()
                    if not built.exists():
                        built.write_text("")
                    elif place.leads:
                        (folder / f"built again by {rank}").write_text("")
            found[rank] = place
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
    return [found[rank] for rank in range(6)]


def leaders(places: list[Place]) -> list[int]:
    return [place.rank for place in places if place.leads]


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_one_leader_for_one_shared_disk(tmp_path: Path) -> None:
    places = places_of(*[[tmp_path]] * 3)
    assert leaders(places) == [0]
    assert {(place.node_rank, place.num_nodes, place.led_by) for place in places} == {(0, 1, (0,))}
    assert [path.name for path in tmp_path.iterdir()] == ["built"], "a probe was left, or more than one built"


def test_one_leader_on_each_node_without_a_shared_disk(tmp_path: Path) -> None:
    disks = [folder(tmp_path / str(node)) for node in range(3)]
    places = places_of(*[[disk] for disk in disks])
    assert leaders(places) == [0, 2, 4]
    assert [place.node_rank for place in places] == list(NODES)
    assert all([path.name for path in disk.iterdir()] == ["built"] for disk in disks)


def test_two_of_three_nodes_share(tmp_path: Path) -> None:
    own, shared = folder(tmp_path / "own"), folder(tmp_path / "shared")
    places = places_of([own], [shared], [shared])
    assert leaders(places) == [0, 2]
    assert [place.node_rank for place in places] == [0, 0, 1, 1, 1, 1] and places[5].node(1) == 1
    # Nodes 0 and 2 share, node 1 stands between them.
    places = places_of([folder(tmp_path / "a")], [folder(tmp_path / "b")], [tmp_path / "a"])
    assert leaders(places) == [0, 2] and [place.node_rank for place in places] == [0, 0, 1, 1, 0, 0]


def test_all_folders_must_be_shared(tmp_path: Path) -> None:
    """A shared index does not help a node whose pictures belong on its own disk."""
    index = folder(tmp_path / "index")
    roots = [folder(tmp_path / str(node)) for node in range(3)]
    places = [Place(rank, 6, NODES[rank], 3, leads=rank % 2 == 0) for rank in range(6)]
    assert leaders(learn(places, [[index, root] for root in roots])) == [0, 2, 4]
    assert list(index.iterdir()) == []


def test_a_folder_that_cannot_be_made_leaves_its_node_alone(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    places = [Place(rank, 6, NODES[rank], 3, leads=rank % 2 == 0) for rank in range(6)]
    disks = [[tmp_path / "new"], [blocked / "below"], [tmp_path / "new"]]
    assert leaders(learn(places, disks)) == [0, 2]


def learn(places: list[Place], folders: list[list[Path]]) -> list[Place]:
    shared, found = dist.HashStore(), {}

    def run(place: Place) -> None:
        found[place.rank] = place_on_disk(shared, place, folders[place.node_rank])

    threads = [threading.Thread(target=run, args=(place,)) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return [found[place.rank] for place in places]


def test_a_node_that_never_looks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "DEAD_SECONDS", 0.2)
    with pytest.raises(DistributedError, match=rf"not all nodes looked at {tmp_path} within 0\.2 s\. fix: "):
        place_on_disk(dist.HashStore(), Place(0, 2, 0, 2, leads=True), [tmp_path])
    assert list(tmp_path.iterdir()) == []


def test_one_node_needs_no_probe(tmp_path: Path) -> None:
    place = Place(1, 2, 0, 1, leads=False)
    assert place_on_disk(dist.HashStore(), place, [tmp_path / "missing"]) == place
    assert list(tmp_path.iterdir()) == []
