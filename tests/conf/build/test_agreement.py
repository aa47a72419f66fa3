"""Ranks that run different programs are refused before the first step."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from conf.build.agreement import PROGRAM, ROOT, source_digest
from train_utils.run.same_start import difference


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the program at another place."""
    root = tmp_path_factory.mktemp("program")
    for part in PROGRAM:
        shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.glob("*.py"):
        shutil.copy(path, root)
    return root


def test_the_place_of_the_program_does_not_matter(copied: Path) -> None:
    assert source_digest(copied) == source_digest(ROOT)


@pytest.mark.parametrize(
    "changed",
    ["train.py", "conf/schema.py", "data/samples/plan.py", "models/loss/yolo.py", "train_utils/loop/step.py"],
)
def test_a_change_of_any_file_is_refused(copied: Path, changed: str) -> None:
    path, before = copied / changed, source_digest(copied)
    text = path.read_text()
    path.write_text(text + "# another program\n")
    try:
        after = source_digest(copied)
    finally:
        path.write_text(text)
    assert difference([{"the program": before}, {"the program": after}]) is not None
