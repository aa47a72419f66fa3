"""Charts of an evaluation agree with its table, and stay readable for any number of classes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from tests.train_utils.coco_sets import coco128, draw, many_classes
from train_utils.coco_eval import COMPUTE, hotcoco_evaluation, score, to_columns
from train_utils.detections import Detections, GroundTruth
from train_utils.plots import (
    NAMED,
    draw_confusion,
    draw_precision_recall,
    label,
    line_style,
)

OUT = Path("unused.png")


def area_of_lines(axis: Axes) -> tuple[list[float], float]:
    """The means over 101 recalls, as in pycocotools, of the classes' lines and of their mean."""
    drawn = [line for line in axis.lines if len(np.asarray(line.get_xdata())) == 101]
    for line in drawn:
        assert np.allclose(np.asarray(line.get_xdata()), np.linspace(0, 1, 101))
    areas = [float(np.asarray(line.get_ydata()).mean()) for line in drawn]
    assert drawn[-1].get_linewidth() == 2.5
    return areas[:-1], areas[-1]


def assert_areas_are_the_table(
    truth: GroundTruth, found: Detections, figures: list[Figure], backends: Iterable[str] = COMPUTE
) -> None:
    boxes = np.bincount(truth.classes[~truth.crowd.astype(bool)], minlength=len(truth.names))
    draw_precision_recall(truth, found, OUT)
    order = [cls for cls in np.argsort(boxes)[::-1] if boxes[cls]]
    for backend in backends:
        table = score(truth, found, backend)
        for axis, figure in zip(figures[-1].axes, ("AP50", "AP"), strict=True):
            of_classes, of_all = area_of_lines(axis)
            rows = [table.per_class[truth.names[cls]][figure] for cls in order]
            assert np.allclose(of_classes, rows, rtol=0, atol=1e-12), (backend, figure)
            assert of_all == pytest.approx(table.figures[figure], abs=1e-12)
            legend = [text.get_text() for text in axis.get_legend().get_texts()]
            assert f"mean of all classes  {table.figures[figure]:.3f}" in legend
            assert legend[0] == f"{label(truth.names[order[0]])}  {rows[0]:.3f}"


@pytest.mark.parametrize("seed", range(4))
def test_the_area_under_each_drawn_curve_is_its_ap_in_the_table(seed: int, kept: list[Figure]) -> None:
    assert_areas_are_the_table(*draw(seed, images=15 + 5 * seed), kept)


def test_the_area_under_each_drawn_curve_is_its_ap_on_photographs(shared_dir: Path, kept: list[Figure]) -> None:
    """A real network on real images: .370 and .161 in shared_dir/darknet/README.md."""
    truth, found = coco128(shared_dir)
    assert_areas_are_the_table(truth, found, kept, ["pycocotools"])
    assert [round(area_of_lines(axis)[1], 3) for axis in kept[0].axes] == [0.370, 0.161]


def lightness(color: Any) -> float:
    """CIE L* of a colour, 0 (black) to 100 (white)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return float(116 * np.cbrt(np.dot(linear, (0.2126, 0.7152, 0.0722))) - 16)


def test_named_lines_differ_without_their_hue() -> None:
    """In a grey print, and for whoever sees no difference of hue, dashes or lightness remain."""
    styles = [line_style(number) for number in range(NAMED)]
    assert all(a["linestyle"] != b["linestyle"] for a, b in itertools.pairwise(styles))
    for a, b in itertools.combinations(styles, 2):
        assert a["linestyle"] != b["linestyle"] or abs(lightness(a["color"]) - lightness(b["color"])) > 9
    paler = [lightness(style["color"]) for style in styles]
    assert max(paler) < 75, "a line is hard to see on white paper"


def test_class_names_appear_as_they_are_cut_to_a_length() -> None:
    """By default, matplotlib hides labels that start with "_" and reads "$...$" as a formula."""
    assert label("_hidden") == " _hidden" and label("$x^{$") == r"\$x^{\$"
    assert label("é 猫\t🐕") == "é U+732BU+0009U+1F415"  # else each square is a warning of three lines
    assert label("n" * 30) == "n" * 30 and label("n" * 31) == "n" * 27 + "..."


@pytest.mark.parametrize("classes", [1, 20, 80])
def test_a_confusion_matrix_has_numbers_that_can_be_read(classes: int, kept: list[Figure]) -> None:
    truth, found = many_classes(classes)
    threshold = float(np.median(found["score"]))
    draw_confusion(truth, found, threshold, OUT)
    sides = to_columns(truth, found[found["score"] >= threshold])
    matrix = hotcoco_evaluation(len(truth.image_ids), classes, *sides).confusion_matrix(iou_thr=0.5)["matrix"]
    axis = cast(Any, kept[-1].axes[0])
    drawn = axis.images[0].get_array()
    x_labels, y_labels = (
        [tick.get_text() for tick in ticks] for ticks in (axis.get_xticklabels(), axis.get_yticklabels())
    )
    assert (x_labels[-1], y_labels[-1]) == ("missed", "nothing there") and x_labels[:-1] == y_labels[:-1]
    if classes <= 30:
        assert np.array_equal(drawn, matrix) and "of" not in axis.get_title().split(", ")[-1]
    else:
        assert drawn.shape == (26, 26) and axis.get_title().endswith("the 25 most confused of 80 classes")
    labels = np.bincount(truth.classes[~truth.crowd.astype(bool)], minlength=classes)
    assert np.array_equal(matrix[:-1].sum(1), labels), "each label is in one cell of its row"
    assert max(kept[-1].get_size_inches()) <= 17
