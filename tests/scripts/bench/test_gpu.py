import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_every_stage_runs_to_its_end_on_a_cpu() -> None:
    # In one process, for the imports; nothing is compiled by the C++ compiler.
    command = [sys.executable, "-m", "scripts.bench.gpu", "--tiny", "--inside"]
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("maps", "gradients"):
        (value,) = re.findall(rf"float32 {name} against float64 on the CPU +(\S+)", done.stdout)
        assert 0 < float(value) < 1e-4
    speeds = re.findall(r" (\S+) images/s", done.stdout)
    assert len(speeds) == 3 + 6 + 2 and all(float(speed) > 0 for speed in speeds)
