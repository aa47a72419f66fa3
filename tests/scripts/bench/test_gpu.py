"""Each stage of the measurements of a GPU runs and leaves rows; on any machine, in small."""

import csv
from pathlib import Path

import pytest
import torch

from scripts.bench.gpu import STAGES, main


def test_without_a_gpu_the_whole_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.bench.gpu.DEVICE", torch.device("cpu"))
    with pytest.raises(SystemExit, match="there is no GPU"):
        main()


@pytest.mark.release
def test_every_stage_leaves_its_measurements(tmp_path: Path) -> None:
    with torch.compiler.set_stance("default"):  # as before at the end
        main("--tiny", f"{tmp_path}/metrics.csv")
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert {row["stage"] for row in rows} == {*STAGES}
    speeds = {row["stage"] for row in rows if row["unit"] == "images/s" and float(row["value"]) > 0}
    assert speeds == {"eager", "fused", "compiled", "float16"}
