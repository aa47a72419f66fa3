"""What the tests of charts share."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved, in place of their files."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, out, dpi: figures.append(figure))
    return figures
