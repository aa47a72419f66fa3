"""The programs, where a warning is an error: with the pinned packages, and, by `make lowest`, with
the oldest that pyproject.toml allows. On several ranks tests/test_programs.py does the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
# One after the other in one process: most of a start is the import of torch.
PROGRAMS = """
import runpy, sys
for program, *options in (
    ["train", "experiment=quickstart", "data.shapes={train_images: 16, val_images: 5, image_size: 64}",
     "data.root=shapes", "data.workers=1", "model.width=0.125", "train.image_size=64", "train.epochs=1", "run_dir=run"],
    ["eval", "ckpt=run", "out=scored"],
    ["predict", "ckpt=run", "source=shapes/*/val/*.jpg", "out=drawn"],
    ["export", "ckpt=run", "format=torch", "out=network.pt2"],
    ["export", "ckpt=run", "format=onnx", "out=network.onnx"],
):
    sys.argv[1:] = options
    try:
        runpy.run_module(program, run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, program
"""


@pytest.mark.release
def test_every_program_starts_and_ends_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-W", "error::DeprecationWarning", "-c", PROGRAMS],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "warning" not in done.stdout.lower(), done.stdout
    for left in ("run/plots/curves.png", "scored", "drawn", "network.pt2", "network.onnx"):
        assert (tmp_path / left).exists(), left
