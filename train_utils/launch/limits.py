"""What the kernel lets this process use: its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def cgroup_folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, int]]:
    """Folder and version (1 or 2) of this process's cgroups, from its own to the root.

    ``controller`` is "memory" or "cpu"; ``root`` holds proc and sys. A container may see the paths
    of its host, so some folders may not exist; then only the top, its own cgroup, is found.
    """
    membership = root / "proc/self/cgroup"
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            tops, version = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], 2
        elif controller in controllers.split(","):
            tops, version = [f"sys/fs/cgroup/{controller}"], 1
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for top in tops:
            for depth in range(len(parts), -1, -1):
                yield root.joinpath(top, *parts[:depth]), version


def core_quota(root: Path = Path("/")) -> float:
    """How many cores' time the smallest quota of this process's cgroups grants; may be infinite.

    A container with a limit on its CPUs often sees all cores of its host.
    """
    quotas = [float("inf")]
    for folder, version in cgroup_folders("cpu", root):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        if all((folder / name).exists() for name in names):
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            quotas += [int(quota) / int(period)] if quota not in ("max", "-1") else []
    return min(quotas)
