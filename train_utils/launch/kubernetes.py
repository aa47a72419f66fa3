"""What a Kubernetes pod says that torchrun, not plain python, should run in."""

from __future__ import annotations

from collections.abc import Mapping

from train_utils.errors import DistributedError


def refuse_pod_of_torchrun(environment: Mapping[str, str]) -> None:
    """Raise DistributedError in a Kubernetes pod whose PET_* options are meant for torchrun.

    If they ask for more processes than there are pods with a rank, plain python would wait for
    processes that nobody starts, or train alone.
    """
    nodes, processes = environment.get("PET_NNODES", "1"), environment.get("PET_NPROC_PER_NODE", "1")
    alone = "RANK" not in environment and nodes.rpartition(":")[2] != "1"
    several = processes.isdecimal() and processes != "1"
    if "LOCAL_RANK" in environment or not (alone or several):
        return
    raise DistributedError(
        f"this pod is made for torchrun (PET_NNODES={nodes}, PET_NPROC_PER_NODE={processes}), and plain python starts "
        "one process without a rank. fix: torchrun train.py ..., which reads them; for one process unset them"
    )
