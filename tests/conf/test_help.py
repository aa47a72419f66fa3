"""The page of all options is current, and says of each what it means."""

from pathlib import Path

from conf.cli import help
from conf.cli.program import PROGRAMS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "train" / "options.md"


def test_the_page_of_options_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == help.options_page(PROGRAMS), "fix: make docs"


def test_every_option_has_a_meaning() -> None:
    rows = [line for line in help.options_page(PROGRAMS).splitlines() if line.startswith("| `")]
    assert len(rows) > 150
    assert not [row for row in rows if row.endswith("|  |")]
