"""The check of a cluster, on gloo's ranks: all pass, and it sees what is not exact."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conf.launch import environment_of_one
from scripts.conformance import largest_difference

REPOSITORY = Path(__file__).parents[2]
CHECKS = 6


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_of_this_machine_pass(ranks: int, tmp_path: Path) -> None:
    """Of three the last one kills itself at the end, and torchrun ends all."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    environment = environment_of_one() | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, *torchrun, "-m", "scripts.conformance", *(["kill"] if ranks == 3 else [])],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    rows = [line for line in found.stdout.splitlines() if line.startswith(("pass", "FAIL"))]
    assert len(rows) == CHECKS and all(row.startswith("pass") for row in rows), found.stdout + found.stderr
    assert (found.returncode != 0) == (ranks == 3), found.stderr


def test_a_difference_counts_relative_to_its_tensor() -> None:
    one = {"weight": torch.tensor([100.0, 1.0]), "bias": torch.zeros(2)}
    assert largest_difference(one, one) == 0
    assert largest_difference(one | {"weight": torch.tensor([100.0, 2.0])}, one) == pytest.approx(0.01)
