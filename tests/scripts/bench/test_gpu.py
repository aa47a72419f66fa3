import csv
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.gpu import STAGES, main

REPOSITORY = Path(__file__).resolve().parents[3]


def test_a_call_ends_within_nine_minutes() -> None:
    for call in (1, 2, 3):
        assert 0 < sum(seconds for of_call, _, seconds in STAGES.values() if of_call == call) <= 540


@pytest.mark.slow
def test_every_stage_leaves_its_measurements(tmp_path: Path) -> None:
    """In one process, for the imports."""
    command = [sys.executable, *"-m scripts.bench.gpu 1 2 3 --tiny --inside".split(), f"{tmp_path}/metrics.csv"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert {row["stage"] for row in rows} == {*STAGES}
    values = {row["measurement"]: row["value"] for row in rows}
    for name in ("maps", "gradients"):
        assert 0 < float(values[f"float32 {name} against float64 on the CPU"]) < 1e-4
    assert values["exit code of pytest"] == "0", done.stdout
    speeds = {row["stage"] for row in rows if row["unit"] == "images/s" and float(row["value"]) > 0}
    assert speeds == {*STAGES} - {"machine", "correct", "tests"}


def test_a_stage_that_hangs_is_ended_and_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (call, stage, _) in STAGES.items():
        monkeypatch.setitem(STAGES, name, (call, stage, 0))
    main("2", "--tiny", f"{tmp_path}/metrics.csv")
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [row["stage"] for row in rows] == [name for name, (call, *_) in STAGES.items() if call == 2]
    assert all(row["measurement"] == "FAILED" and "killed" in row["value"] for row in rows)
