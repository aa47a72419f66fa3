"""The cores and control groups of a process, read from made-up systems."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from train_utils.launch.limits import core_quota

V1, V2 = "sys/fs/cgroup/cpu", "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, math.inf),  # not Linux
        ({"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "max 100000"}, math.inf),
        ({"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "250000 100000"}, 2.5),  # docker run --cpus 2.5
        (  # the quota of a pod binds its containers
            {
                "proc/self/cgroup": "0::/pod/a",
                f"{V2}/pod/cpu.max": "400000 100000",
                f"{V2}/pod/a/cpu.max": "max 100000",
            },
            4,
        ),
        (  # a container sees its host's path, and its own cgroup as the top
            {
                "proc/self/cgroup": "9:memory:/a\n4:cpu,cpuacct:/docker/abc",
                f"{V1}/cpu.cfs_quota_us": "600000",
                f"{V1}/cpu.cfs_period_us": "200000",
            },
            3,
        ),
        (
            {"proc/self/cgroup": "4:cpu:/", f"{V1}/cpu.cfs_quota_us": "-1", f"{V1}/cpu.cfs_period_us": "100000"},
            math.inf,
        ),
    ],
)
def test_the_smallest_quota_binds(tmp_path: Path, files: dict[str, str], cores: float) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert core_quota(tmp_path) == cores


def test_the_cores_and_the_quota_of_this_process() -> None:
    assert core_quota() > 0
