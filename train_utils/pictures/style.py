"""One look for all charts: lines that differ in print and to the colour-blind, labels, sizes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # matplotlib takes longer to import than to draw, so only charts pay for it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Four of Okabe and Ito's colours (Color Universal Design, 2008) and two darker ones of Tol (2021).
# Lines with the same dashes differ in lightness, which is what a grey print shows of a colour.
COLORS = ("#0072B2", "#D55E00", "#E69F00", "#56B4E9", "#882255", "#117733")
DASHES = ("-", "--", "-.", ":")
LONGEST = 30  # characters of a class name that show
DPI = 110


def chart(
    width: float, height: float, columns: int = 1, layout: Literal["constrained", "tight"] = "constrained"
) -> tuple[Figure, list[Axes]]:
    """A figure of that size in inches, with its axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout=layout)
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def save(figure: Figure, out: Path) -> None:
    """Write ``figure`` to the file ``out``."""
    figure.savefig(out, dpi=DPI)


def label(name: str) -> str:
    """Escape a class name: in matplotlib "$" starts a formula, and a leading "_" hides a label.

    Letters that its font lacks show as their code, U+732B, instead of as squares that are alike.
    """
    name = "".join(letter if ord(letter) in _letters() else f"U+{ord(letter):04X}" for letter in name)
    shown = (name if len(name) <= LONGEST else f"{name[: LONGEST - 3]}...").replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


@cache
def _letters() -> frozenset[int]:
    """The code points of DejaVu Sans, which comes with matplotlib and stands in for other fonts."""
    from matplotlib import font_manager

    return frozenset(font_manager.get_font(font_manager.findfont("DejaVu Sans")).get_charmap())


def line_style(number: int) -> dict[str, Any]:
    """Colour and dashes of the ``number``-th line of a chart."""
    return {"color": COLORS[number % len(COLORS)], "linestyle": DASHES[number % len(DASHES)], "linewidth": 1.4}


def write_instead(axis: Axes, text: str) -> None:
    """Write ``text`` in the middle of an empty chart."""
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", color="grey")
