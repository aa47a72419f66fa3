"""The device of a rank, and whether the devices of all ranks can work together."""

from __future__ import annotations

import torch

from train_utils.errors import DistributedError
from train_utils.launch.nodes import Peer
from train_utils.processes.store import Store


def choose_device(requested: str, me: Peer) -> tuple[torch.device, str | None]:
    """The device of this rank, and a problem with it. ``requested``: "auto", "cpu" or "cuda"."""
    if requested == "cpu" or (requested == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu"), None
    if not torch.cuda.is_available():
        return torch.device("cpu"), (
            f"a CUDA device was asked for, but torch {torch.__version__} finds none on rank {me.rank}. "
            "fix: train.device=auto, or look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    # Tasks that see only their own GPU (srun --gpus-per-task=1) all number it 0.
    return torch.device("cuda", me.local_rank % torch.cuda.device_count()), None


def device_alone(requested: str) -> torch.device:
    """The device for work that has nothing to do with the ranks of a run, if this is one.

    Raises DistributedError if it is not there.
    """
    device, problem = choose_device(requested, Peer(0, 0, "", 0, 1))
    if problem is not None:
        raise DistributedError(problem)
    return device if device.type == "cpu" else torch.device(device.type, torch.cuda.current_device())


def device_conflict(store: Store, me: Peer, device: torch.device) -> str | None:
    """Why this rank cannot work with its peers on its device; None if it can."""
    first = store.compare_set("device", "", device.type).decode()
    if first != device.type:
        return (
            f"rank {me.rank} would run on {device.type} and others on {first}. "
            "fix: train.device=cpu, or GPUs on all nodes"
        )
    if device.type == "cuda" and store.add(f"gpu/{torch.cuda.get_device_properties(device).uuid}", 1) > 1:
        return (
            f"rank {me.rank} would share {device} of node {me.node_rank} with another process: "
            f"{me.local_world_size} processes see {torch.cuda.device_count()} GPU(s) there. "
            "fix: start one process for each GPU, or train.device=cpu"
        )
    return None
