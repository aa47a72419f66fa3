"""The version page names this project's commit, or none; the page of all options is current."""

import shutil
import subprocess
from pathlib import Path

import pytest

from conf import REPOSITORY
from conf.cli import help
from conf.cli.program import PROGRAMS


def test_an_unpacked_archive_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "theirs"]):
        subprocess.run([*git, *command], check=True)
    unpacked = tmp_path / "ours"
    unpacked.mkdir()
    shutil.copy(REPOSITORY / "pyproject.toml", unpacked)
    monkeypatch.setattr(help, "REPOSITORY", unpacked)
    assert "torch" in help.version_page() and "commit" not in help.version_page()
    monkeypatch.setattr(help, "REPOSITORY", REPOSITORY)
    assert ("commit" in help.version_page()) == (REPOSITORY / ".git").exists()


PAGE = Path(__file__).resolve().parents[2] / "docs" / "train" / "options.md"


def test_the_page_of_options_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == help.options_page(PROGRAMS), "fix: make docs"


def test_every_option_has_a_meaning() -> None:
    rows = [line for line in help.options_page(PROGRAMS).splitlines() if line.startswith("| `")]
    assert len(rows) > 150
    assert not [row for row in rows if row.endswith("|  |")]
