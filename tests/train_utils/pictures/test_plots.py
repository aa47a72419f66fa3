"""Pictures show what they are given, where it is."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from matplotlib.figure import Figure

from train_utils.pictures.boxes import class_color
from train_utils.pictures.charts import draw_class_curves
from train_utils.pictures.plots import draw_curves, draw_detections, draw_targets
from train_utils.pictures.sheets import GAP, GROUP, LINE, MARGIN, PAGE, Cell, Group, save_sheet
from train_utils.scores.operating_points import ClassCurve

NO_BOXES = (np.zeros((0, 4)), np.zeros(0, int))


def sheet_of(path: Path) -> np.ndarray:
    picture = cv2.imread(str(path))
    assert picture is not None
    return picture[..., ::-1].astype(int)


def test_a_sheet_keeps_aspect_ratios_and_colours_and_groups_stand_apart(tmp_path: Path) -> None:
    red = np.zeros((50, 100, 3), np.uint8)
    red[..., 0] = 255
    pair = Group([Cell(red, *NO_BOXES, names=[]), Cell(red, *NO_BOXES, names=[])])
    save_sheet([pair, pair, pair], 2, tmp_path / "sheet.png", side=100)
    sheet = sheet_of(tmp_path / "sheet.png")
    width = 2 * 100 + 3 * GAP
    assert sheet.shape == (2 * (50 + 2 * GAP) + 3 * MARGIN, 2 * width + 3 * MARGIN, 3)
    row = sheet[MARGIN + GAP + 25]
    for left in (MARGIN, 2 * MARGIN + width):
        for x in (left + GAP, left + 2 * GAP + 100):
            assert (row[x : x + 100] == [255, 0, 0]).all()
        assert (row[left + GAP + 100 : left + 2 * GAP + 100] == GROUP).all(), "a pair is joined by its plate"
        assert (row[left - MARGIN : left] == PAGE).all(), "pairs stand apart"
    assert (sheet[-MARGIN - 50 :, -MARGIN - width :] == PAGE).all(), "the fourth place is empty"


def test_names_are_drawn_at_the_size_of_the_page_whatever_that_of_the_image(tmp_path: Path) -> None:
    """A box of the same place and name in images of 100 and of 4000 pixels looks the same."""
    pages = []
    for side in (100, 4000):
        box = np.array([[0.25, 0.25, 0.75, 0.75]]) * side
        image = np.full((side, side, 3), 90, np.uint8)
        cell = Cell(image, box, np.array([0]), ["a name"], np.array([0.87]), title="right")
        save_sheet([Group([cell], "7.jpg")], 1, tmp_path / "page.png", side=400)
        pages.append(sheet_of(tmp_path / "page.png"))
    assert np.array_equal(*pages)
    assert (pages[0][MARGIN : MARGIN + LINE] != GROUP).any(), "no title"


def test_detections_stand_beside_the_labels_of_their_picture_and_none_is_said(tmp_path: Path) -> None:
    image = np.full((440, 440, 3), 90, np.uint8)
    labels, weak = np.array([[100, 100, 200, 200, 0]]), np.array([[100, 100, 200, 200, 0.3, 0]])
    sheets = []
    for detections in (weak, np.array([[100, 100, 200, 200, 0.9, 0]])):
        draw_detections([("a.jpg", image, labels, detections)], ["cat"], tmp_path / "pairs.png")
        sheets.append(sheet_of(tmp_path / "pairs.png"))
    top, left, right = MARGIN + 2 * LINE + GAP, MARGIN + GAP, MARGIN + 2 * GAP + 440
    for sheet in sheets:
        assert tuple(sheet[top + 150, left + 200]) == class_color(0), "the label"
    assert tuple(sheets[1][top + 150, right + 200]) == class_color(0), "the detection"
    assert (sheets[0][top + 150, right + 200] == 90).all(), "it is not above 0.3"
    said = sheets[0][top + 190 : top + 250, right + 100 : right + 340]
    assert (said == PAGE).all(-1).any() and (said == 0).all(-1).any(), "nothing is said on the empty side"


def test_a_long_file_name_keeps_its_end_and_stays_in_its_place(tmp_path: Path) -> None:
    image = np.full((40, 40, 3), 90, np.uint8)
    for name in ("folder/" * 40 + "7.jpg", "7.jpg"):
        save_sheet([Group([Cell(image, *NO_BOXES, names=[], title=name)])], 1, tmp_path / "page.png", side=100)
        sheet = sheet_of(tmp_path / "page.png")
        assert (sheet[:, -MARGIN:] == PAGE).all() and (sheet[MARGIN : MARGIN + LINE] != GROUP).any()


def test_targets_are_drawn_on_the_image_they_belong_to(tmp_path: Path) -> None:
    images = np.full((2, 3, 440, 440), 90, np.uint8)
    draw_targets(images, np.array([[1, 0, 200, 200, 100, 60]], np.float32), ["box"], tmp_path / "batch.png")
    sheet = sheet_of(tmp_path / "batch.png")
    first, second, top = MARGIN + GAP, 2 * MARGIN + 3 * GAP + 440, MARGIN + GAP
    assert not (sheet[top:, first : first + 440] == class_color(0)).all(-1).any(), "the first image has no boxes"
    assert tuple(sheet[top + 200, second + 150]) == class_color(0)


@pytest.mark.parametrize("epochs", [0, 1, 2, 7, 300])
def test_curves_have_whole_epochs_and_average_precision_from_0_to_1(
    epochs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "metrics.csv"
    rows = "".join(f"{epoch},0.01,5.5,0.0{epoch % 10},-1.0\n" for epoch in range(1, epochs + 1))
    table.write_text("epoch,lr,loss,AP,APs\n" + rows)
    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, out, dpi: kept.append(figure))
    draw_curves(table, tmp_path / "curves.png")
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


def test_curves_leave_out_epochs_without_an_evaluation(tmp_path: Path) -> None:
    table = tmp_path / "metrics.csv"
    table.write_text("epoch,lr,loss,AP,AP50\n1,0.01,5.5,,\n2,0.02,4.5,0.1,0.3\n3,0.01,4.0,-1.0,-1.0\n")
    draw_curves(table, tmp_path / "curves.png")
    picture = cv2.imread(str(tmp_path / "curves.png"))
    assert picture is not None and picture.std() > 5


def test_class_names_stand_in_the_legend_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, matplotlib hides labels that start with "_" and reads "$...$" as a formula."""
    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, out, dpi: kept.append(figure))
    curve = ClassCurve(3, np.array([0.9, 0.5], np.float32), np.array([1.0, 0.5]), np.array([0.3, 0.6]))
    draw_class_curves([curve, curve], ["_hidden", "$x^{$"], tmp_path / "curves.png")
    shown = [text.get_text().strip() for text in kept[0].axes[0].get_legend().get_texts()]
    assert shown == ["_hidden", r"\$x^{\$"]
    draw_class_curves([], [], tmp_path / "nothing.png")
    assert [text.get_text() for text in kept[1].axes[0].texts] == ["no detections"]
