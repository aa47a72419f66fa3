import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.gpu import STAGES

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_every_stage_runs_to_its_end_on_a_cpu(tmp_path) -> None:
    out = tmp_path / "gpu.jsonl"
    names = [stage.__name__ for stage in STAGES]
    # In one process, for the imports; nothing is compiled by the C++ compiler.
    command = [sys.executable, "-m", "scripts.bench.gpu", "--tiny", "--inside", "--out", str(out), *names]
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["stage"] for row in rows} == set(names)
    found = {(row["stage"], row["figure"]): row["value"] for row in rows}
    for name in ("maps", "gradients"):
        assert 0 < found["correct", f"float32 {name} against float64 on the CPU"] < 1e-4
    assert all(row["value"] > 0 for row in rows if row["unit"].endswith("/s"))
