"""Pictures show what they are given, where it is."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from train_utils.drawing import class_color
from train_utils.plots import draw_curves, draw_targets, save_sheet


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
