"""Charts show their table and stay readable; each is drawn whatever the data."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from matplotlib.axes import Axes

from tests.train_utils.coco_sets import coco128, draw, many_classes
from train_utils.coco_eval import score
from train_utils.report import plots
from train_utils.report.draw import GAP, LINE, SIDE, class_color
from train_utils.report.plots import (
    count_confusions,
    draw_confusion,
    draw_detections,
    draw_evaluation,
    draw_precision_recall,
)
from train_utils.results import Detections, GroundTruth, make_detections


def lines_of(axis: Axes) -> dict[str, list[tuple[float, float]]]:
    return {
        str(line.get_label()): [(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)]
        for line in axis.lines
    }


def test_curves_are_the_columns_over_steps_and_the_best_epoch_is_marked(tmp_path) -> None:
    table = tmp_path / "metrics.csv"
    table.write_text(
        "epoch,step,lr,loss,loss_dfl,loss_l1,AP,AP50,val_loss\n1,10,0.01,5.5,0,0,,,\n2,20,0.02,4.5,0,0,0.1,0.3,7\n"
        "3,30,0.01,4.0,0,0,-1.0,-1.0,8\n4,40,0.0,4,0,0.5,0.1,0.2,9\n"
    )
    loss, precision, by_size, rate = map(lines_of, plots.draw_curves(table, 2).axes)
    assert loss.pop("best: epoch 2, AP 0.100") == [(20, 0), (20, 1)]
    assert loss == {  # without loss_dfl: a term that is 0 throughout is one that the loss lacks
        "loss": [(10, 5.5), (20, 4.5), (30, 4.0), (40, 4.0)],
        "loss_l1": [(10, 0), (20, 0), (30, 0), (40, 0.5)],
        "val_loss": [(20, 7), (30, 8), (40, 9)],
    }
    assert precision.pop("best: epoch 2, AP 0.100")[0][0] == 20
    assert precision == {"AP": [(20, 0.1), (40, 0.1)], "AP50": [(20, 0.3), (40, 0.2)]}
    assert set(by_size) == {"best: epoch 2, AP 0.100"} and rate["lr"] == [(10, 0.01), (20, 0.02), (30, 0.01), (40, 0.0)]


def area_of_lines(axis: Axes) -> tuple[list[float], float]:
    """The means over 101 recalls, as in pycocotools, of the classes' lines and of their mean."""
    drawn = [line for line in axis.lines if len(np.asarray(line.get_xdata())) == 101]
    for line in drawn:
        assert np.allclose(np.asarray(line.get_xdata()), np.linspace(0, 1, 101))
    areas = [float(np.asarray(line.get_ydata()).mean()) for line in drawn]
    assert drawn[-1].get_linewidth() == 2.5
    return areas[:-1], areas[-1]


def assert_areas_are_the_table(truth: GroundTruth, found: Detections) -> list[Axes]:
    boxes = np.bincount(truth.classes[~truth.crowd.astype(bool)], minlength=len(truth.names))
    table = score(truth, found)
    axes: list[Axes] = draw_precision_recall(table).axes
    order = [index for index in np.argsort(boxes)[::-1] if boxes[index]]
    for axis, metric in zip(axes, ("AP50", "AP"), strict=True):
        of_classes, of_all = area_of_lines(axis)
        rows = [table.per_class[truth.names[index]][metric] for index in order]
        assert np.allclose(of_classes, rows, rtol=0, atol=1e-12), metric
        assert of_all == pytest.approx(table.metrics[metric], abs=1e-12)
        legend = [text.get_text() for text in axis.get_legend().get_texts()]
        assert f"mean of all classes  {table.metrics[metric]:.3f}" in legend
        assert legend[0] == f"{plots.label(truth.names[order[0]])}  {rows[0]:.3f}"
    return axes


def test_the_area_under_each_drawn_curve_is_its_ap_in_the_table(shared_dir: Path) -> None:
    """Of drawn boxes, and of a real network: .370 and .161 in shared_dir/darknet/README.md."""
    assert_areas_are_the_table(*draw(1, images=20))
    axes = assert_areas_are_the_table(*coco128(shared_dir)[:2])
    assert [round(area_of_lines(axis)[1], 3) for axis in axes] == [0.370, 0.161]


@pytest.mark.parametrize("classes", [20, 80])
def test_a_confusion_matrix_has_numbers_that_can_be_read(classes: int) -> None:
    truth, found = many_classes(classes)
    axis = draw_confusion(score(truth, found), float(np.median(found["score"]))).axes[0]
    drawn = axis.images[0].get_array()
    x_labels, y_labels = (
        [tick.get_text() for tick in ticks] for ticks in (axis.get_xticklabels(), axis.get_yticklabels())
    )
    assert (x_labels[-1], y_labels[-1]) == ("missed", "nothing there") and x_labels[:-1] == y_labels[:-1]
    texts = {(int(text.get_position()[1]), int(text.get_position()[0])): int(text.get_text()) for text in axis.texts}
    assert texts == {(row, column): drawn[row, column] for row, column in np.argwhere(drawn)}
    if classes <= 30:
        labels = np.bincount(truth.classes[~truth.crowd.astype(bool)], minlength=classes)
        assert np.array_equal(drawn[:-1].sum(1), labels), "each label is in one cell of its row"
    else:
        assert len(drawn) == 31 and axis.get_title().endswith("the 30 most confused of 80 classes")


def test_confusions_are_those_of_a_count_by_hand() -> None:
    boxes = [[0, 0, 10, 10], [20, 0, 10, 10], [60, 0, 10, 10], [40, 40, 30, 30], [0, 0, 10, 10]]
    truth = GroundTruth(
        np.array([9, 7]), np.full((2, 2), 99), np.array([0, 4, 5]), np.array(boxes, float), np.array([0, 1, 0, 0, 1]),
        np.array([False, False, False, True, False]), np.full(5, 100.0), ["cat", "dog"],
    )  # fmt: skip
    rows = [
        (0, 0.8, [0, 0, 10, 10]),  # on the first cat, which the dog of .9 has taken: nothing there
        (1, 0.9, [0, 1, 10, 11]),
        (1, 0.7, [20, 0, 30, 5]),  # the dog, at an IoU of just .5
        (0, 0.6, [42, 42, 48, 48]),  # within the crowd
        (1, 0.6, [38, 50, 46, 58]),  # within it by three quarters
        (0, 0.5, [80, 80, 90, 90]),
        (0, 0.4, [60, 0, 70, 10]),  # below the threshold: the second cat is missed
    ]
    classes, scores, corners = map(np.array, zip(*rows, strict=True))
    elsewhere = make_detections(7, np.array([1]), np.array([0.5]), np.array([[0, 6, 10, 16]]))  # too far from the dog
    found = np.concatenate([make_detections(9, classes, scores, corners), elsewhere])
    counts = count_confusions(score(truth, found), 0.5)
    assert counts.tolist() == [[0, 1, 1], [0, 1, 1], [2, 1, 0]]
    assert count_confusions(score(truth, found[:0]), 0.5).tolist() == [[0, 0, 2], [0, 0, 2], [0, 0, 0]]


OF_TRAINING = {"curves.png"}


def read(position: int) -> np.ndarray | None:
    return np.full((500, 500, 3), 90, np.uint8) if position != 2 else None


def drawn(truth: GroundTruth, found: Detections, folder: Path) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    draw_evaluation(folder, score(truth, found), read, lambda i: f"{i}.jpg", said.append)
    pictures = {path.name: cv2.imread(str(path)) for path in folder.glob("*.[jp]*g")}
    for name, picture in pictures.items():
        assert picture is not None and picture.std() > 3, f"{name} is empty"
    return pictures, said


def test_detections_stand_beside_the_labels_of_their_picture(tmp_path: Path) -> None:
    box = np.array([[100.0, 100, 100, 100]])
    truth = GroundTruth(
        np.array([7]), np.array([[SIDE, SIDE]]), np.array([0, 1]), box, np.array([0]), np.array([False]),
        np.array([1e4]), ["cat"],
    )  # fmt: skip
    image = np.full((SIDE, SIDE, 3), 90, np.uint8)
    for confidence, shown in ((0.24, (90, 90, 90)), (0.75, class_color(0))):
        found = make_detections(7, np.array([0]), np.array([confidence]), np.array([[100, 100, 200, 200]]))
        draw_detections(score(truth, found), lambda _: image, str, 0.25, tmp_path / "pairs.png")
        sheet = cv2.imread(str(tmp_path / "pairs.png"))[..., ::-1]
        assert tuple(sheet[LINE + 150, GAP + 200]) == class_color(0), "the label"
        assert tuple(sheet[LINE + 150, SIDE + 2 * GAP + 200]) == shown, "the detection"


@pytest.mark.release
def test_plots_of_odd_names_nothing_found_and_nothing_labelled(tmp_path: Path) -> None:
    truth, found = draw(1)
    empty = {key: getattr(truth, key)[:0] for key in ("boxes_xywh", "classes", "crowd", "areas")}
    unlabelled = GroundTruth(truth.image_ids, truth.sizes, np.zeros_like(truth.offsets), names=truth.names, **empty)
    few = many_classes(4)
    few[0].names[:3] = ["_hidden", "$x^{$", "e" * 99]  # by default matplotlib hides it, or reads a formula
    few[0].names[3] = "\U000f0000\U000f0001"  # letters without a sign are escaped
    cases = [few, (truth, found[:0]), (unlabelled, found), (unlabelled, found[:0])]
    for number, case in enumerate(cases):
        pictures, said = drawn(*case, tmp_path / str(number))
        absent = {"mistakes.jpg"} if len(case[0].classes) + len(case[1]) == 0 else set()
        assert set(pictures) == set(plots.PLOTS) - OF_TRAINING - absent and not said


def test_a_plot_that_fails_is_said_and_the_others_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(plots, "draw_confusion", fail)
    (tmp_path / "confusion.png").write_text("of an earlier run")
    pictures, said = drawn(*draw(1), tmp_path)
    assert set(pictures) == set(plots.PLOTS) - OF_TRAINING - {"confusion.png"}
    assert said == [f"warning: {tmp_path / 'confusion.png'} was not drawn (MemoryError: no room)"]
