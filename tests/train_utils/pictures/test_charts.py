"""Charts show the numbers they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.train_utils.coco_sets import NAMES, draw, many_classes
from train_utils.pictures import charts
from train_utils.pictures.charts import draw_box_sizes, draw_classes, draw_labels

OUT = Path("unused.png")


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


def test_labels_are_counted_without_crowds_and_placed_as_shares_of_their_image(kept: list[Figure]) -> None:
    truth, _ = draw(3, images=30)
    draw_labels(truth, "validation", OUT)
    bars, centres, shapes, areas = cast(list[Any], kept[0].axes)
    counted = ~truth.crowd.astype(bool)
    counts = np.bincount(truth.classes[counted], minlength=4)
    order = np.argsort(-counts, kind="stable")
    assert [label.get_text() for label in bars.get_xticklabels()] == [NAMES[cls] for cls in order]
    assert [bar.get_height() for bar in bars.patches] == counts[order].tolist()
    assert bars.get_title() == f"validation: 30 images, {counted.sum()} boxes"
    for axis, points in (
        (centres, truth.boxes_xywh[:, :2] + truth.boxes_xywh[:, 2:] / 2), (shapes, truth.boxes_xywh[:, 2:])
    ):  # fmt: skip
        shares = (points[counted] / 500).clip(0, 1)
        expected = np.histogram2d(*shares.T, bins=[np.linspace(0, 1, 51)] * 2)[0].T
        drawn: Any = np.ma.asarray(axis.collections[0].get_array())
        assert np.array_equal(drawn.filled(0).reshape(50, 50), expected), axis.get_title()
    assert centres.get_ylim()[0] > centres.get_ylim()[1], "y grows downwards, as in the picture"
    assert sum(bar.get_height() for bar in areas.patches) == counted.sum()


@pytest.mark.parametrize("classes", [1, 20, 80, 300])
def test_labels_of_any_number_of_classes_have_a_row_each_up_to_80(classes: int, kept: list[Figure]) -> None:
    draw_labels(many_classes(classes)[0], "training", OUT)
    assert len(kept[0].axes[0].patches) == min(80, classes)
    assert ("220 more classes" in kept[0].axes[0].get_title()) == (classes == 300)
    assert max(kept[0].get_size_inches()) < 20
