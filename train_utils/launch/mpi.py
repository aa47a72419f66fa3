"""The launch as an MPI launcher describes it.

MPI only starts the processes; they meet like under any other launcher. Open MPI's mpirun sets
OMPI_COMM_WORLD_*, mpiexec of MPICH and Intel MPI sets PMI_* and MPI_LOCAL*. None of them says where
rank 0 is.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import NamedTuple

from train_utils.errors import DistributedError
from train_utils.launch.launch import FIRST_PORT, PORTS, Launch, integer, integer_or_none

TORCH_PORT = 29500  # torch's default


class Names(NamedTuple):
    """The environment variables of one launcher."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


FAMILIES = (
    Names(*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def mpi_names(environment: Mapping[str, str]) -> Names | None:
    """The variables that this process's MPI launcher uses; None without an MPI launcher."""
    return next((names for names in FAMILIES if names.rank in environment or names.world_size in environment), None)


def read_mpi(environment: Mapping[str, str], names: Names) -> Launch:
    """Read the launch of an MPI process.

    Raises DistributedError if a number is missing, or if the ranks span several hosts and
    MASTER_ADDR does not say where rank 0 is.
    """
    rank, world_size = integer(environment, names.rank), integer(environment, names.world_size)
    local_world_size = integer_or_none(environment, names.local_world_size)
    address = environment.get("MASTER_ADDR", "localhost" if local_world_size == world_size else "")
    if not address:
        raise DistributedError(
            f"mpirun started {world_size} processes on several hosts, and none says where rank 0 is. "
            "fix: mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=<a free port there> (MPICH: -genv NAME VALUE)"
        )
    # The job's name, the same on all ranks and different from other jobs'. MPICH has none.
    job = environment.get("PMIX_NAMESPACE")
    port = FIRST_PORT + zlib.crc32(job.encode()) % PORTS if job else TORCH_PORT
    return Launch(
        "mpirun",
        rank=rank,
        world_size=world_size,
        local_rank=integer_or_none(environment, names.local_rank),
        local_world_size=local_world_size,
        node_rank=None,  # OMPI_COMM_WORLD_NODE_RANK does not number the node
        address=address,
        port=integer(environment, "MASTER_PORT", default=port),
    )


def refuse_unknown_mpi(environment: Mapping[str, str]) -> None:
    """Raise DistributedError if an MPI launcher gave a rank but no number of processes."""
    if "PMIX_RANK" in environment:
        raise DistributedError(
            f"PMIX_RANK={environment['PMIX_RANK']} shows that an MPI launcher started this process, but not how "
            "many there are, so it would train alone. fix: mpirun, torchrun or srun; for one process unset PMIX_RANK"
        )
