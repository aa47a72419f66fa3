"""Pictures show what they are given, where it is."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from train_utils.plots import class_color, draw_boxes, draw_curves, draw_targets, save_sheet


def test_a_box_is_drawn_in_its_class_colour_on_its_edge_and_the_image_is_left_alone() -> None:
    image = np.full((200, 300, 3), 40, np.uint8)
    drawn = draw_boxes(image, np.array([[50.0, 60.0, 150.0, 160.0]]), np.array([2]), ["a", "b", "cat"], np.array([0.9]))
    assert (image == 40).all()
    for x, y in ((50, 100), (150, 100), (100, 160)):
        assert tuple(drawn[y, x]) == class_color(2)
    assert (drawn[80:150, 70:140] == 40).all(), "the inside is covered"
    assert (drawn[:60, 50:100] != 40).any(), "no name above the box"


def test_neighbouring_classes_have_colours_apart() -> None:
    colors = np.array([class_color(i) for i in range(12)], dtype=int)
    apart = np.abs(colors[:, None] - colors[None]).max(-1) + 255 * np.eye(12, dtype=int)
    assert apart.min() > 30


def test_a_sheet_keeps_aspect_ratios_and_colours(tmp_path: Path) -> None:
    red = np.zeros((50, 100, 3), np.uint8)
    red[..., 0] = 255
    save_sheet([red, red, red], 2, tmp_path / "sheet.png", cell=100)
    sheet = cv2.imread(str(tmp_path / "sheet.png"))[..., ::-1]
    assert sheet.shape == (200, 200, 3)
    assert (sheet[:50, :200] == [255, 0, 0]).all() and (sheet[50:100] == 114).all()
    assert (sheet[100:, 100:] == 114).all(), "the fourth place is empty"


def test_targets_are_drawn_on_the_image_they_belong_to(tmp_path: Path) -> None:
    images = np.full((2, 3, 400, 400), 90, np.uint8)
    draw_targets(images, np.array([[1, 0, 200, 200, 100, 60]], np.float32), ["box"], tmp_path / "batch.png")
    sheet = cv2.imread(str(tmp_path / "batch.png"))[..., ::-1]
    assert (sheet[:400, :400] == 90).all(), "the first image has no boxes"
    assert tuple(sheet[200, 400 + 150]) == class_color(0)


def test_curves_leave_out_epochs_without_an_evaluation(tmp_path: Path) -> None:
    table = tmp_path / "metrics.csv"
    table.write_text("epoch,lr,loss,AP,AP50\n1,0.01,5.5,,\n2,0.02,4.5,0.1,0.3\n3,0.01,4.0,-1.0,-1.0\n")
    draw_curves(table, tmp_path / "curves.png")
    picture = cv2.imread(str(tmp_path / "curves.png"))
    assert picture is not None and picture.std() > 5
