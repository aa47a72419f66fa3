"""Charts of an evaluation agree with its table, and stay readable for any number of classes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from tests.train_utils.coco_sets import INSTALLED, coco128, draw, many_classes
from train_utils.pictures.score_charts import (
    ALL,
    ERROR_KINDS,
    draw_average_precision,
    draw_calibration,
    draw_confidence,
    draw_confusion,
    draw_error_kinds,
    draw_precision_recall,
)
from train_utils.pictures.style import NAMED, label, line_style
from train_utils.scores.coco_eval import ABSENT, score
from train_utils.scores.detections import Detections, GroundTruth
from train_utils.scores.diagnosis import diagnose

OUT = Path("unused.png")


def area_of_lines(axis: Axes) -> tuple[list[float], float]:
    """The means over 101 recalls, as in pycocotools, of the classes' lines and of their mean."""
    drawn = [line for line in axis.lines if len(np.asarray(line.get_xdata())) == 101]
    for line in drawn:
        assert np.allclose(np.asarray(line.get_xdata()), np.linspace(0, 1, 101))
    areas = [float(np.asarray(line.get_ydata()).mean()) for line in drawn]
    assert drawn[-1].get_linewidth() == ALL["linewidth"]
    return areas[:-1], areas[-1]


def assert_areas_are_the_table(
    truth: GroundTruth, found: Detections, figures: list[Figure], backends: list[str] = INSTALLED
) -> None:
    diagnosis = diagnose(truth, found)
    boxes = [curve.boxes for curve in diagnosis.curves]
    draw_precision_recall(diagnosis, OUT)
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


def test_figures_over_the_score_are_the_curves_and_only_the_first_classes_are_named(kept: list[Figure]) -> None:
    truth, found = many_classes(NAMED + 5)
    diagnosis = diagnose(truth, found[found["class"] > 0])
    draw_confidence(diagnosis, OUT)
    most_boxes = sorted(diagnosis.curves[1:], key=lambda curve: -curve.boxes)[:NAMED]
    for axis, figure in zip(kept[0].axes, ("precision", "recall", "f1"), strict=True):
        heights = [np.asarray(line.get_ydata(), float) for line in axis.lines]
        for height, curve in zip(heights, most_boxes, strict=False):
            assert np.array_equal(height, getattr(curve, figure))
        assert np.array_equal(heights[NAMED + 4], getattr(diagnosis.pooled, figure))
    named = [text.get_text() for text in kept[0].axes[-1].get_legend().get_texts()]
    assert named[NAMED:] == ["all boxes together", "4 more classes", f"best F1 of all: {diagnosis.threshold:.2g}"]
    draw_confidence(diagnose(truth, found[:0]), OUT)
    assert [axis.texts[0].get_text() for axis in kept[1].axes] == ["no detections"] * 3


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
    diagnosis = diagnose(*many_classes(classes))
    for normalize, key in ((False, "matrix"), (True, "normalized")):
        draw_confusion(diagnosis, normalize, OUT)
        axis = cast(Any, kept[-1].axes[0])
        drawn, matrix = axis.images[0].get_array(), diagnosis.confusion[key]
        x_labels, y_labels = (
            [tick.get_text() for tick in ticks] for ticks in (axis.get_xticklabels(), axis.get_yticklabels())
        )
        assert (x_labels[-1], y_labels[-1]) == ("missed", "nothing there") and x_labels[:-1] == y_labels[:-1]
        if classes <= 30:
            assert np.array_equal(drawn, matrix) and "of" not in axis.get_title().split(", ")[-1]
        else:
            assert drawn.shape == (26, 26) and axis.get_title().endswith("the 25 most confused of 80 classes")
        assert axis.texts[0].get_text() in (f"{matrix[0, 0]:.2f}", f"{matrix[0, 0]:.0f}")
        assert max(kept[-1].get_size_inches()) <= 17


def test_bars_and_points_of_ap_are_the_table(kept: list[Figure]) -> None:
    truth, found = draw(2, images=40)
    table = score(truth, found, "auto")
    draw_average_precision(table, OUT)
    left, right = kept[0].axes
    present = sorted(
        (n for n, row in table.per_class.items() if row["AP"] >= 0), key=lambda n: -table.per_class[n]["AP"]
    )
    assert [tick.get_text() for tick in left.get_yticklabels()] == ["all classes", *present]
    rows = [table.figures, *(table.per_class[name] for name in present)]
    for bars in left.containers:
        assert [bar.get_width() for bar in bars] == [row[bars.get_label()] for row in rows]
    for line, column in zip(right.lines, ("APs", "APm", "APl"), strict=True):
        expected = [(row[column], place) for place, row in enumerate(rows) if row[column] != ABSENT]
        assert list(zip(*line.get_data(), strict=True)) == expected
    draw_average_precision(replace(table, figures=dict.fromkeys(table.figures, ABSENT), per_class={}), OUT)


def test_calibration_and_kinds_of_errors_are_the_numbers_given(kept: list[Figure]) -> None:
    diagnosis = diagnose(*many_classes(3))
    draw_calibration(diagnosis, OUT)
    assert diagnosis.calibration is not None
    shares = [row["avg_accuracy"] for row in diagnosis.calibration["bins"] if row["count"]]
    bars, gaps = cast(Any, kept[0].axes[0]).containers[:2]
    assert [bar.get_height() for bar in bars] == shares
    assert lightness(bars[0].get_facecolor()) - lightness(gaps[0].get_facecolor()) > 20, "one grey in print"
    draw_calibration(replace(diagnosis, calibration=None), OUT)
    assert kept[1].axes[0].texts[0].get_text() == "scores outside 0 to 1"
    draw_error_kinds(diagnosis, OUT)
    axis: Any = kept[2].axes[0]
    assert [bar.get_width() for bar in axis.patches] == [diagnosis.tide["delta_ap"][kind] for kind in ERROR_KINDS]
    assert [tick.get_text() for tick in axis.get_yticklabels()] == list(ERROR_KINDS.values())
    assert axis.texts[0].get_text().endswith(f"({diagnosis.tide['counts']['Cls']:,})")
