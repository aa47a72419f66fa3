"""Charts show the numbers they are given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from train_utils.pictures import charts
from train_utils.pictures.charts import NAMED, draw_box_sizes, draw_class_curves, draw_classes, draw_curves
from train_utils.scores.operating_points import ClassCurve

OUT = Path("unused.png")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved, in place of their files."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, out, dpi: figures.append(figure))
    return figures


def lines_of(axis: Axes) -> dict[str, list[tuple[float, float]]]:
    """The points of each line by its label."""
    return {
        str(line.get_label()): [(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)]
        for line in axis.lines
    }


@pytest.mark.parametrize("epochs", [0, 1, 2, 7, 300])
def test_curves_have_whole_epochs_and_average_precision_from_0_to_1(
    epochs: int, tmp_path: Path, kept: list[Figure]
) -> None:
    table = tmp_path / "metrics.csv"
    rows = "".join(f"{epoch},0.01,5.5,0.0{epoch % 10},-1.0\n" for epoch in range(1, epochs + 1))
    table.write_text("epoch,lr,loss,AP,APs\n" + rows)
    draw_curves(table, OUT)
    for axis in kept[0].axes:
        low, high = axis.get_xlim()
        ticks = [tick for tick in axis.get_xticks() if low <= tick <= high]
        assert all(tick == int(tick) for tick in ticks), ticks
        if epochs:
            assert 1 <= len(ticks) <= 12 and all(1 <= tick <= epochs for tick in ticks if tick), ticks
        if "AP" in axis.get_title() or "precision" in axis.get_title():
            assert axis.get_ylim() == (0, 1)
    said = [text.get_text() for text in kept[0].axes[2].texts]
    assert said == ["no figures"], "an evaluation without boxes of a size has no curve"


def test_curves_are_the_columns_and_leave_out_epochs_without_an_evaluation(tmp_path: Path, kept: list[Figure]) -> None:
    table = tmp_path / "metrics.csv"
    table.write_text("epoch,lr,loss,AP,AP50\n1,0.01,5.5,,\n2,0.02,4.5,0.1,0.3\n3,0.01,4.0,-1.0,-1.0\n")
    draw_curves(table, OUT)
    loss, precision, by_size, rate = map(lines_of, kept[0].axes)
    assert loss == {"loss": [(1, 5.5), (2, 4.5), (3, 4.0)]}
    assert precision == {"AP": [(2, 0.1)], "AP50": [(2, 0.3)]}
    assert by_size == {} and rate == {"lr": [(1, 0.01), (2, 0.02), (3, 0.01)]}


def class_curve(boxes: int, f1_at: int) -> ClassCurve:
    """Two thresholds; the best F1 is at position ``f1_at``."""
    precision = np.array([1.0, 0.5]) if f1_at else np.array([1.0, 0.1])
    return ClassCurve(boxes, np.array([0.9, 0.5], np.float32), precision, np.array([0.3, 0.6]))


def test_class_curves_show_each_class_and_mark_its_best_f1(kept: list[Figure]) -> None:
    few, many = class_curve(3, 1), class_curve(9, 0)
    draw_class_curves([few, many, ClassCurve(2, *[np.zeros(0)] * 3)], ["few", "many", "never found"], OUT)
    left, right = kept[0].axes
    assert list(lines_of(left)) == ["many", "few"], "classes with most boxes come first"
    assert lines_of(left)["few"] == [(0.3, 1.0), (0.6, 0.5)]
    assert [y for _, y in lines_of(right)["few"]] == pytest.approx(few.f1.tolist())
    dots = [line.get_data() for line in right.lines if line.get_marker() == "o"]
    assert [(float(x[0]), float(y[0])) for x, y in dots] == [
        pytest.approx((0.9, many.f1[0])), pytest.approx((0.5, few.f1[1])),
    ]  # fmt: skip


def test_only_the_first_classes_are_named(kept: list[Figure]) -> None:
    count = NAMED + 5
    draw_class_curves([class_curve(9, 0)] * count, [f"class {number}" for number in range(count)], OUT)
    left = kept[0].axes[0]
    assert len(left.lines) == count and len(left.get_legend().get_texts()) == NAMED


def test_class_names_appear_in_the_legend_as_they_are(kept: list[Figure]) -> None:
    """By default, matplotlib hides labels that start with "_" and reads "$...$" as a formula."""
    draw_class_curves([class_curve(3, 1)] * 2, ["_hidden", "$x^{$"], OUT)
    shown = [text.get_text().strip() for text in kept[0].axes[0].get_legend().get_texts()]
    assert shown == ["_hidden", r"\$x^{\$"]
    draw_class_curves([], [], OUT)
    assert [text.get_text() for text in kept[1].axes[0].texts] == ["no detections"]


def test_classes_are_bars_the_most_frequent_first(kept: list[Figure], monkeypatch: pytest.MonkeyPatch) -> None:
    train = [{"name": "rare", "boxes": 2}, {"name": "common", "boxes": 50}, {"name": "$", "boxes": 7}]
    monkeypatch.setattr(charts, "MOST_BARS", 2)
    draw_classes({"train": train, "val": [{"name": "common", "boxes": 4}]}, OUT)
    (axis,) = kept[0].axes
    assert [label.get_text() for label in axis.get_xticklabels()] == ["common", r"\$"]
    bars = {str(group.get_label()): [bar.get_height() for bar in group] for group in axis.containers}
    assert bars == {"train": [50, 7], "val": [4, 0]}
    middles = [[bar.get_x() + bar.get_width() / 2 for bar in group] for group in axis.containers]
    assert np.allclose(np.mean(middles, axis=0), [0, 1]), "bars are not centred on their class"


def test_box_sizes_are_points_beside_anchors_and_strides(kept: list[Figure], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, anchors = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]]), np.array([[16.0, 30.0]])
    draw_box_sizes({"train": sizes}, anchors, [8, 32], 416, OUT)
    monkeypatch.setattr(charts, "MOST_POINTS", 2)
    draw_box_sizes({"train": sizes}, anchors, [8], 416, OUT)
    (axis,), (thinned,) = (figure.axes for figure in kept)
    points = {str(group.get_label()): np.asarray(group.get_offsets()).tolist() for group in axis.collections}
    assert points == {"train": sizes.tolist(), "anchors": anchors.tolist()}
    assert [text.get_text() for text in axis.texts] == ["stride 8", "stride 32"]
    assert len(np.asarray(thinned.collections[0].get_offsets())) == 2
