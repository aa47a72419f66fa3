"""The version page names the commit of this project, or none."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from conf import REPOSITORY
from conf.answers import help as page


def test_an_unpacked_archive_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the repository which it was unpacked in."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "theirs"]):
        subprocess.run([*git, *command], check=True)
    unpacked = tmp_path / "ours"
    unpacked.mkdir()
    shutil.copy(REPOSITORY / "pyproject.toml", unpacked)
    monkeypatch.setattr(page, "REPOSITORY", unpacked)
    assert "torch" in page.version_page() and "commit" not in page.version_page()
    monkeypatch.setattr(page, "REPOSITORY", REPOSITORY)
    assert ("commit" in page.version_page()) == (REPOSITORY / ".git").exists()
