"""Charts of an evaluation agree with its table, and stay readable for any number of classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from matplotlib.axes import Axes
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
from train_utils.scores.operating_points import ClassCurve

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
    draw_precision_recall(diagnosis.precision, boxes, truth.names, OUT)
    order = [cls for cls in np.argsort(-np.array(boxes), kind="stable") if boxes[cls]]
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


def class_curve(boxes: int) -> ClassCurve:
    return ClassCurve(boxes, np.array([0.9, 0.5], np.float32), np.array([1.0, 0.5]), np.array([0.3, 0.6]))


def test_figures_over_the_score_are_the_curves_and_only_the_first_classes_are_named(kept: list[Figure]) -> None:
    count = NAMED + 5
    curves = [class_curve(number) for number in range(1, count)] + [ClassCurve(99, *[np.zeros(0)] * 3)]
    pooled = ClassCurve(120, np.array([0.9, 0.6], np.float32), np.array([0.8, 0.4]), np.array([0.1, 0.2]))
    draw_confidence(curves, pooled, 0.6, [f"class {number}" for number in range(count)], OUT)
    axes = kept[0].axes
    for axis, figure in zip(axes, ("precision", "recall", "f1"), strict=True):
        points = {str(line.get_label()): np.asarray(line.get_ydata(), float) for line in axis.lines}
        assert np.allclose(points["all boxes together"], getattr(pooled, figure))
        assert np.allclose(points["class 10"], getattr(curves[10], figure))
    named = [text.get_text() for text in axes[-1].get_legend().get_texts()]
    most_boxes = [f"class {number}" for number in range(count - 2, count - 2 - NAMED, -1)]
    assert named == [*most_boxes, "all boxes together", "best F1 of all: 0.6", "4 more classes"]
    draw_confidence([], ClassCurve(0, *[np.zeros(0)] * 3), 0.3, [], OUT)
    assert [axis.texts[0].get_text() for axis in kept[1].axes] == ["no detections"] * 3


def test_named_lines_differ_in_colour_or_dashes() -> None:
    styles = [line_style(number) for number in range(NAMED)]
    assert len({(style["color"], style["linestyle"]) for style in styles}) == NAMED


def test_class_names_appear_as_they_are_cut_to_a_length() -> None:
    """By default, matplotlib hides labels that start with "_" and reads "$...$" as a formula."""
    assert label("_hidden") == " _hidden" and label("$x^{$") == r"\$x^{\$"
    assert label("n" * 30) == "n" * 30 and label("n" * 31) == "n" * 27 + "..."


@pytest.mark.parametrize("classes", [1, 20, 80, 100])
def test_a_confusion_matrix_has_numbers_while_they_can_be_read(classes: int, kept: list[Figure]) -> None:
    diagnosis = diagnose(*many_classes(classes))
    names = [f"class {number}" for number in range(classes)]
    for matrix in (diagnosis.confusion, diagnosis.confusion_share):
        draw_confusion(matrix, names, 0.5, OUT)
        axis, side = kept[-1].axes[0], min(classes, 80) + 1
        drawn: Any = np.ma.asarray(axis.images[0].get_array())
        assert drawn.shape == (side, side)
        assert drawn.filled(0)[-1, -1] == matrix[-1, -1] == 0
        if classes <= 80:
            assert np.array_equal(drawn.filled(0), matrix)
        assert len(axis.texts) == (np.count_nonzero(matrix) if classes <= 25 else 0)
        assert [axis.get_xticklabels()[-1].get_text(), axis.get_yticklabels()[-1].get_text()] == [
            "missed", "nothing there",
        ]  # fmt: skip
        assert ("20 rarer classes left out" in axis.get_title()) == (classes == 100)
        assert max(kept[-1].get_size_inches()) <= 17


def test_bars_and_points_of_ap_are_the_table(kept: list[Figure]) -> None:
    truth, found = draw(2, images=40)
    table = score(truth, found, "auto")
    draw_average_precision(table.figures, table.per_class, OUT)
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
    draw_average_precision(dict.fromkeys(table.figures, ABSENT), {}, OUT)


def test_calibration_and_kinds_of_errors_are_the_numbers_given(kept: list[Figure]) -> None:
    diagnosis = diagnose(*many_classes(3))
    draw_calibration(diagnosis.calibration, OUT)
    left, right = cast(list[Any], kept[0].axes)
    assert diagnosis.calibration is not None
    bins = [row for row in diagnosis.calibration["bins"] if row["count"]]
    points = [(row["avg_confidence"], row["avg_accuracy"]) for row in bins]
    assert list(zip(*left.lines[1].get_data(), strict=True)) == points
    assert [bar.get_height() for bar in right.patches] == [row["count"] for row in bins]
    draw_calibration(None, OUT)
    assert kept.pop().axes[1].texts[0].get_text() == "scores outside 0 to 1"
    draw_error_kinds(diagnosis.tide, OUT)
    axis: Any = kept[1].axes[0]
    assert [bar.get_width() for bar in axis.patches] == [diagnosis.tide["delta_ap"][kind] for kind in ERROR_KINDS]
    assert [tick.get_text() for tick in axis.get_yticklabels()] == list(ERROR_KINDS.values())
    assert all(
        f"({diagnosis.tide['counts'][kind]:,})" in text.get_text()
        for kind, text in zip(ERROR_KINDS, axis.texts, strict=True)
    )
