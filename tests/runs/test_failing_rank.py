"""A rank that fails under torchrun: one sentence, exit code 2, and the others end soon.

test_slurm.py has the same under srun. ``python test_failing_rank.py <options>`` is the training.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs.kill_resume import OPTIONS
from tests.train_utils.test_distributed import clean_environment


def fail_on_rank_1() -> None:
    """Let the third forward pass of rank 1 raise an error for users."""
    from models import Darknet, ModelError
    from train_utils.launch import read_launch

    forward, calls = Darknet.forward, []

    def failing(self: Darknet, images: torch.Tensor) -> Any:
        calls.append(1)
        if self.training and len(calls) > 2 and read_launch().rank == 1:
            Path("failed").touch()
            raise ModelError("the third pass fails. fix: nothing")
        return forward(self, images)

    setattr(Darknet, "forward", failing)  # noqa: B010


@pytest.mark.slow
def test_a_rank_that_fails_says_it_once_and_ends_all(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, __file__, *OPTIONS], cwd=tmp_path, env=clean_environment(), capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    seconds = time.time() - (tmp_path / "failed").stat().st_mtime
    # Anywhere in a line: another rank may have written half of one.
    assert done.stderr.count("error: the third pass fails. fix: nothing") == done.stderr.count("error: ") == 1
    assert re.search(r"exitcode *: 2\b", done.stderr) and done.returncode != 0, done.stderr
    assert seconds < 30, f"all ended {seconds:.0f} s after the error"


if __name__ == "__main__":
    from conf.programs import run

    fail_on_rank_1()
    run("train")
