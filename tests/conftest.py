"""Fixtures for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# Small networks are faster so, and the tests share the machine; the programs that they start
# inherit it.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The reference material that docs/testing.md lists; tests that need it skip where it is
    absent.
    """
    folder = Path(os.environ.get("YOLO_TEST_DATA", REPOSITORY.parent / "shared")).resolve()
    if not (folder / "darknet").is_dir() or not (folder / "data").is_dir():
        pytest.skip(f"no reference material in {folder}. fix: YOLO_TEST_DATA=<folder>, see docs/testing.md")
    return folder


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Tests draw the same numbers in any order and selection."""
    torch.manual_seed(0)
