"""What ``auto`` becomes on this machine or that, on all ranks alike, and in a resumed run."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from conf.build import batches, start
from conf.build.batches import cores_of_rank, loader_workers
from conf.entry import compose
from conf.schema import TrainConfig
from data import Colour
from train_utils.distributed import World
from train_utils.memory.out_of_memory import GIB

CPU = World(0, 0, 1, 1, 0, 1, torch.device("cpu"), "none", "none")
GPU = replace(CPU, device=torch.device("cuda", 0))
PAIR = replace(GPU, world_size=4, local_world_size=2, num_nodes=2, node_rank=1)


@pytest.fixture
def gpu_memory(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Has the memory of the GPU, in GiB, as ``total``."""
    memory = SimpleNamespace(total=80)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=int(memory.total * GIB))
    )
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    return memory


def resolved(world: World, *options: str, saved: str | None = None) -> tuple[Colour, object]:
    config = compose("train", TrainConfig, list(options))
    state = None if saved is None else {"config": {"augment": {"colour": saved}}}
    found = start.resolve(config, world, state)
    assert config == compose("train", TrainConfig, list(options)), "the options as given, for config.yaml, changed"
    return found.augment.colour, found.train.max_device_batch_size


def test_colours_change_where_the_device_is(gpu_memory: SimpleNamespace) -> None:
    assert resolved(CPU)[0] is Colour.cpu and resolved(GPU)[0] is Colour.device
    assert resolved(GPU, "augment.colour=cpu")[0] is Colour.cpu
    assert resolved(CPU, "augment.colour=device")[0] is Colour.device


def test_a_resumed_run_changes_colours_where_it_did(gpu_memory: SimpleNamespace) -> None:
    assert resolved(GPU, saved="cpu")[0] is Colour.cpu and resolved(CPU, saved="device")[0] is Colour.device
    # Another place is another training, and refused as such.
    assert resolved(CPU, "augment.colour=cpu", saved="device")[0] is Colour.cpu


@pytest.mark.parametrize(
    ("memory", "options", "images"),
    [
        (8, [], 8),
        (15.8, [], 16),
        (79.3, [], 128),
        (139, [], 128),
        (79.3, ["train.precision=float32"], 64),
        (79.3, ["train.image_size=1280"], 32),
        (79.3, ["train.multi_scale=[0.5,2.0]"], 32),
        (2, ["train.image_size=2048"], 1),
        (8, ["train.max_device_batch_size=5"], 5),
    ],
)
def test_a_pass_has_what_the_memory_of_a_gpu_suggests(
    gpu_memory: SimpleNamespace, memory: float, options: list[str], images: int
) -> None:
    gpu_memory.total = memory
    assert resolved(GPU, *options)[1] == images
    assert resolved(CPU, *[option for option in options if "max" not in option])[1] == 16


def test_all_ranks_take_the_pass_of_the_smallest_gpu(
    gpu_memory: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    smallest = -int(math.log2(16))
    monkeypatch.setattr("conf.build.device_batch.max_over_ranks", lambda values: [max(*values, smallest)])
    assert resolved(GPU)[1] == 16


def has_cores(patch: pytest.MonkeyPatch, own: set[int], others: dict[int, set[int]], quota: float = math.inf) -> None:
    """Let this rank use the cores ``own`` and others, by node, theirs."""

    def stacked(row: Tensor) -> Tensor:
        rows = [row]
        for node, cores in others.items():
            rows.append(torch.zeros_like(row).index_fill(0, torch.tensor([1 + core for core in cores]), 1))
            rows[-1][0] = node
        return torch.stack(rows)

    patch.setattr(batches, "usable_cores", lambda: own)
    patch.setattr(batches, "core_quota", lambda: quota)
    patch.setattr(batches, "stack_over_ranks", stacked)


def test_ranks_share_the_cores_of_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    everything, elsewhere = set(range(16)), set(range(100, 164))
    has_cores(monkeypatch, everything, {1: everything, 0: elsewhere})  # as torchrun starts them
    assert cores_of_rank(PAIR) == 8
    has_cores(monkeypatch, set(range(8)), {1: set(range(8, 16)), 0: elsewhere})  # as srun binds them
    assert cores_of_rank(PAIR) == 8
    has_cores(monkeypatch, everything, {1: everything, 0: elsewhere}, quota=5.5)
    assert cores_of_rank(PAIR) == 2
    has_cores(monkeypatch, everything, {}, quota=0.5)
    assert cores_of_rank(CPU) == 1


@pytest.mark.parametrize(("cores", "on_gpu", "on_cpu"), [(1, 1, 1), (2, 1, 2), (8, 7, 2), (16, 15, 2), (128, 16, 2)])
def test_loader_processes_by_cores(monkeypatch: pytest.MonkeyPatch, cores: int, on_gpu: int, on_cpu: int) -> None:
    has_cores(monkeypatch, set(range(cores)), {})
    assert loader_workers("auto", GPU) == on_gpu and loader_workers("auto", CPU) == on_cpu
    assert loader_workers(0, GPU) == 0 and loader_workers(99, CPU) == 99


def test_a_rank_with_a_number_of_its_own_answers_those_with_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes may differ in data.workers, and an exchange that some ranks leave out never ends."""
    asked: list[Tensor] = []
    monkeypatch.setattr(batches, "stack_over_ranks", lambda row: (asked.append(row), row[None])[1])
    for wanted in (3, "auto"):
        loader_workers(wanted, CPU)
    assert len(asked) == 2
