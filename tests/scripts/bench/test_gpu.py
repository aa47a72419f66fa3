from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from scripts.bench import gpu
from scripts.bench.gpu import STAGES, Rows, run_stage, run_stages, table

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_every_stage_runs_to_its_end_on_a_cpu(tmp_path) -> None:
    out = tmp_path / "gpu.jsonl"
    out.touch()
    # In one process, for the imports; nothing is compiled by the C++ compiler.
    command = [sys.executable, "-m", "scripts.bench.gpu", "--tiny", "--inside", "--out", str(out), *STAGES]
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = Rows(out, "").all()
    assert {row["stage"] for row in rows} == set(STAGES)
    assert not [row for row in rows if str(row["value"]).startswith("FAILED") or row["value"] == "NO"]
    found = {(row["stage"], row["figure"]): row["value"] for row in rows}
    for name in ("maps", "gradients"):
        assert 0 < found["correct", f"float32 {name} against float64 on the CPU"] < 1e-4
    kinds = ("convolution", "norm and activation", "loss", "input", "update")
    assert all(found["eager", kind] > 0 for kind in kinds)
    assert found["nccl", "loss with DDP against plain"] < 0.1
    assert all(row["value"] > 0 for row in rows if row["unit"].endswith("/s"))


def test_a_stage_is_ended_with_all_that_it_started(tmp_path) -> None:
    assert run_stage([sys.executable, "-c", "pass"], 60) == ""
    assert run_stage([sys.executable, "-c", "print(1); raise ValueError('too hot')"], 60) == "ValueError: too hot"
    alive = tmp_path / "alive"
    worker = f"import time\nwhile True: open({str(alive)!r}, 'w').close(); time.sleep(.01)"
    started = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {worker!r}])\ntime.sleep(99)"
    assert run_stage([sys.executable, "-c", started], 2) == "not done after 2 s"
    assert alive.exists()
    alive.unlink()
    time.sleep(0.2)
    assert not alive.exists()


def test_the_table_is_complete_as_far_as_the_stages_came(tmp_path, monkeypatch, capsys) -> None:
    out, seen = tmp_path / "gpu.jsonl", []

    def fake(command, seconds) -> str:
        name = command[-1]
        seen.append((name, "--tiny" in command, seconds <= STAGES[name][1]))
        Rows(out, name).add("speed", 1234.5, "images/s", "620 images/s")
        return "not done after 45 s" if name == "machine" else ""

    monkeypatch.setattr(gpu, "run_stage", fake)
    run_stages(["machine", "eager"], ["--tiny"], out, 100)
    assert seen == [("machine", True, True), ("eager", True, True)]
    shown = capsys.readouterr().out
    assert shown.count("1234 images/s   620 images/s") == 2
    assert shown.index("FAILED: not done after 45 s") < shown.rindex("eager:")
    run_stages(["machine", "eager"], [], out, 1)
    assert len(seen) == 2
    assert [row["value"] for row in Rows(out, "").all()] == ["no time left"] * 2
    assert table([]).count("\n") == 0


def test_waits_are_counted_by_their_place() -> None:
    from scripts.bench.on_gpu.profiling import waits

    def run() -> None:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    found = waits(run)
    assert found.total() == 2
    assert next(iter(found)).startswith("bench/test_gpu.py:")


def test_options_are_those_of_conf() -> None:
    from data import AugmentConfig, Colour
    from scripts.bench.on_gpu.common import options

    mosaic = options(AugmentConfig, "augment/mosaic.yaml", colour=Colour.device)
    assert (mosaic.mosaic, mosaic.colour) == (1.0, Colour.device)
