"""Who this process is among the processes of a run."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class World:
    """This process and the others; ranks count from 0, ``local`` means on the same node."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    device: torch.device
    launcher: str  # "torchrun", "srun", "mpirun", "none", or "group" where another program had opened one
    backend: str  # "nccl" (with gloo for tensors on the CPU), "gloo", or "none" for one process

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that prints and writes."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the process that prepares things on its node."""
        return self.local_rank == 0
