"""docs/train/options.md is what the option dataclasses and the YAML files say."""

from __future__ import annotations

from pathlib import Path

from scripts.options_page import page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "train" / "options.md"


def test_the_page_of_options_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "fix: make docs"


def test_every_option_has_a_meaning() -> None:
    """The comment beside its field; a formatter that breaks the line leaves none."""
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    assert len(rows) > 200
    assert not [row for row in rows if row.endswith("|  |")]
