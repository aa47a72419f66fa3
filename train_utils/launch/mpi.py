"""What an MPI launcher says about this process. It only starts the processes: they meet as all others do.

Open MPI's mpirun tells place and numbers in OMPI_COMM_WORLD_*; mpiexec of MPICH and Intel MPI in PMI_* and MPI_LOCAL*.
None tells where rank 0 is.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import NamedTuple

from train_utils.errors import DistributedError
from train_utils.launch.place import FIRST_PORT, PORTS, Launch, integer, integer_or_none

TORCH_PORT = 29500  # torch's own choice where nobody makes one


class Names(NamedTuple):
    """Under which names one launcher gives the numbers."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


FAMILIES = (
    Names(*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def mpi_names(environment: Mapping[str, str]) -> Names | None:
    """The names that the MPI launcher of this process uses; None where no such launcher started it."""
    return next((names for names in FAMILIES if names.rank in environment or names.world_size in environment), None)


def read_mpi(environment: Mapping[str, str], names: Names) -> Launch:
    """The launch that mpirun describes. Raises DistributedError where a number is missing, or where the processes are
    on several hosts and nobody says where they meet."""
    rank, world_size = integer(environment, names.rank), integer(environment, names.world_size)
    local_world_size = integer_or_none(environment, names.local_world_size)
    address = environment.get("MASTER_ADDR", "localhost" if local_world_size == world_size else "")
    if not address:
        raise DistributedError(
            f"mpirun started {world_size} processes on several hosts, and none says where rank 0 is. "
            "fix: mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=<a free port there> (MPICH: -genv NAME VALUE)"
        )
    # Its name of the job is the same for all processes and no other job's. MPICH gives none.
    job = environment.get("PMIX_NAMESPACE")
    port = FIRST_PORT + zlib.crc32(job.encode()) % PORTS if job else TORCH_PORT
    return Launch(
        "mpirun",
        rank=rank,
        world_size=world_size,
        local_rank=integer_or_none(environment, names.local_rank),
        local_world_size=local_world_size,
        node_rank=None,  # OMPI_COMM_WORLD_NODE_RANK is no number of the node
        address=address,
        port=integer(environment, "MASTER_PORT", default=port),
    )


def refuse_unknown_mpi(environment: Mapping[str, str]) -> None:
    """Raise DistributedError where an MPI launcher gave this process a rank but no number of processes."""
    if "PMIX_RANK" in environment:
        raise DistributedError(
            f"PMIX_RANK={environment['PMIX_RANK']} says that an MPI launcher started this process, but not with how "
            "many others, and it would train alone. fix: mpirun, torchrun or srun; for one process unset PMIX_RANK"
        )
