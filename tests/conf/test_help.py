"""The page of all options is current, and says of each what it means."""

from pathlib import Path

from conf.cli import help
from conf.cli.program import PROGRAMS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "train" / "options.md"


def test_the_page_of_options_is_current_and_each_has_a_meaning() -> None:
    page = help.options_page(PROGRAMS)
    assert PAGE.read_text(encoding="utf-8") == page, "fix: make docs"
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 150 and not [row for row in rows if row.endswith("|  |")]
