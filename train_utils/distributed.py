"""The functions for multi-process training: how ranks meet, wait, share numbers and end together.

It fronts launch/ and processes/; parallel/ builds on it. In a single process each function does
nothing or returns its input, so callers need no second path. What must answer before torch is
imported is in launch/environment.py (launcher and job) and processes/ending.py (who reports an
error).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from train_utils.launch.environment import read_launch, watched_parent
from train_utils.launch.orphans import watch_parent
from train_utils.processes.ending import ending
from train_utils.processes.process_group import Group, launch_of_group
from train_utils.processes.shared_disks import find_builders
from train_utils.processes.world import World
from train_utils.processes.zero_first import leaders_first

__all__ = [
    "World", "barrier", "broadcast_module", "broadcast_text", "gather_arrays", "init_distributed_mode",
    "max_over_ranks", "stack_over_ranks", "sum_over_ranks", "torch_distributed_zero_first",
]  # fmt: skip

_group = Group()


def init_distributed_mode(device: str, timeout_seconds: float) -> World:
    """Find out how this process was launched, choose its device and join its peers.

    An existing process group, e.g. of Ray Train, is used as it is. ``device`` is "auto" (CUDA if
    there is a GPU), "cpu" or "cuda". ``timeout_seconds`` bounds the start if it is below
    JOIN_SECONDS, and later the time to notice lost ranks, report them and exit. Raises
    DistributedError, with the same sentence on all ranks, if one has no device of its own.
    """
    ending.leave(keep=True)  # of an earlier training in this process
    ending.joining = True
    if (parent := watched_parent()) is not None:
        watch_parent(parent)
    foreign = dist.is_initialized() and ending.destroy_group is None
    launch = launch_of_group() if foreign else read_launch()
    return _group.enter(launch, device, timeout_seconds)


def torch_distributed_zero_first(world: World, *folders: Path) -> AbstractContextManager[None]:
    """Run the body on one rank per disk first, then on the others: one builds, the rest open.

    The leader is local rank 0 of each node. With ``folders``, where the body writes, nodes that see
    the same folders share one leader; probe files tell. The others wait on the store, not in a
    collective, so a leader may take hours. No rank leaves before all leaders are done. If a leader
    raises, every other rank raises DistributedError with its sentence. They also raise it if a
    leader is silent for zero_first.DEAD_SECONDS or the store is lost. All ranks must enter in the
    same order.
    """
    if world.world_size == 1:
        return nullcontext()
    store = _group.shared_store()
    return leaders_first(store, world, find_builders(store, world, folders))


def barrier() -> None:
    """Wait until every rank is here, at most for the group's time-out."""
    if dist.is_initialized():
        here = torch.zeros(1)
        dist.all_reduce(here, group=_group.of(here))  # on gloo, so the device's queue is left alone


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Sum ``tensor`` (same shape and dtype everywhere) over all ranks, without autograd."""
    if not dist.is_initialized():
        return tensor
    total = tensor.detach().clone()
    dist.all_reduce(total, group=_group.of(total))
    return total


def max_over_ranks(values: list[int]) -> list[int]:
    """The maximum of each value over all ranks, exchanged on the CPU."""
    if not dist.is_initialized():
        return [int(value) for value in values]
    largest = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=_group.of(largest))
    return [int(value) for value in largest]


def stack_over_ranks(tensor: Tensor) -> Tensor:
    """Stack ``tensor`` (same shape and dtype everywhere) in rank order: (ranks, *shape)."""
    if not dist.is_initialized():
        return tensor[None]
    stacked = tensor.new_empty(dist.get_world_size() * tensor.numel())  # gloo wants a flat output
    dist.all_gather_into_tensor(stacked, tensor.flatten(), group=_group.of(tensor))
    return stacked.view(-1, *tensor.shape)


def broadcast_text(text: str | None) -> str:
    """The text of rank 0 on every rank; what its peers pass is ignored."""
    if not dist.is_initialized():
        assert text is not None
        return text
    content = np.frombuffer((text or "").encode(), dtype=np.uint8)
    length = torch.tensor([content.size])
    dist.broadcast(length, src=0, group=_group.of(length))
    received = torch.from_numpy(content.copy()) if dist.get_rank() == 0 else torch.empty(int(length), dtype=torch.uint8)
    if length > 0:
        dist.broadcast(received, src=0, group=_group.of(received))
    return received.numpy().tobytes().decode()


def broadcast_module(module: nn.Module) -> None:
    """Overwrite parameters and buffers with rank 0's, so all ranks score the same model."""
    if dist.is_initialized():
        for tensor in chain(module.parameters(), module.buffers()):
            dist.broadcast(tensor.detach(), src=0, group=_group.of(tensor))


def gather_arrays(array: np.ndarray) -> list[np.ndarray] | None:
    """The arrays of all ranks in rank order, on rank 0; None elsewhere.

    First dimensions may differ and be 0. The dtype, which may be structured, and other dimensions
    must be equal. Raw bytes are sent on the CPU, never pickled objects.
    """
    if not dist.is_initialized():
        return [array]
    payload = torch.from_numpy(np.array(array, order="C").reshape(-1).view(np.uint8))
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([payload.numel()]), group=_group.of(payload))
    if dist.get_rank() != 0:
        if payload.numel() > 0:
            dist.send(payload, dst=0, group=_group.of(payload))
        return None
    gathered = [array]
    for rank, size in enumerate(sizes[1:], start=1):
        received = torch.empty(int(size), dtype=torch.uint8)
        if received.numel() > 0:
            dist.recv(received, src=rank, group=_group.of(received))
        gathered.append(received.numpy().view(array.dtype).reshape(-1, *array.shape[1:]))
    return gathered
