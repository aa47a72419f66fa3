"""Rank, node and device of this process."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class World:
    """Rank, node and device of this process; ``local``: on the same node."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    device: torch.device
    launcher: str  # "torchrun", "srun", "none", or "group" if another program opened it
    backend: str  # "nccl" (with gloo for CPU tensors), "gloo", or "none" for one process

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes files."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this rank prepares data for its node."""
        return self.local_rank == 0
