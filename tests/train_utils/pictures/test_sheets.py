"""Sheets show the images and boxes they are given, at the right place."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from train_utils.detections import make_detections
from train_utils.draw import GAP, LINE, SIDE, Cell, class_color, draw_detections, draw_targets, save_sheet

NO_BOXES = (np.zeros((0, 4)), np.zeros(0, int))
SECOND = 2 * GAP + SIDE  # left edge of the second cell


def sheet_of(path: Path) -> np.ndarray:
    picture = cv2.imread(str(path))
    assert picture is not None
    return picture[..., ::-1].astype(int)


def test_a_sheet_keeps_aspect_ratios_and_colours(tmp_path: Path) -> None:
    red = np.zeros((50, 100, 3), np.uint8)
    red[..., 0] = 255
    save_sheet([Cell(red, *NO_BOXES, names=[])] * 3, 2, tmp_path / "sheet.png")
    sheet = sheet_of(tmp_path / "sheet.png")
    assert sheet.shape == (2 * (LINE + SIDE + GAP) + GAP, 2 * (SIDE + GAP) + GAP, 3)
    for left in (GAP, SECOND):
        cell = sheet[LINE : LINE + SIDE, left : left + SIDE]
        assert (cell[: SIDE // 2] == [255, 0, 0]).all() and (cell[SIDE // 2 :] == 255).all()
        assert (sheet[LINE + 10, left - GAP : left] == 255).all(), "cells stand apart"
    assert (sheet[LINE + SIDE + GAP :, SECOND:] == 255).all(), "the fourth place is empty"


def test_names_are_drawn_at_the_size_of_the_page_whatever_that_of_the_image(tmp_path: Path) -> None:
    """A box of the same place and name in images of 100 and of 4000 pixels looks the same."""
    pages = []
    for side in (100, 4000):
        box = np.array([[0.25, 0.25, 0.75, 0.75]]) * side
        image = np.full((side, side, 3), 90, np.uint8)
        cell = Cell(image, box, np.array([0]), ["a name"], np.array([0.87]), title="x" * 99 + "7.jpg")
        save_sheet([cell], 1, tmp_path / "page.png")
        pages.append(sheet_of(tmp_path / "page.png"))
    assert np.array_equal(*pages)
    assert (pages[0][:LINE] != 255).any() and (pages[0][:, -GAP:] == 255).all(), "the title is there and fits"
    picture = pages[0][LINE:, GAP:]
    assert tuple(picture[SIDE // 2, SIDE // 4]) == class_color(0), "no box"
    assert (picture[SIDE // 4 - 20 : SIDE // 4, SIDE // 4 : SIDE // 2] != 90).any(), "no name above the box"


def test_detections_stand_beside_the_labels_of_their_picture(tmp_path: Path) -> None:
    image = np.full((SIDE, SIDE, 3), 90, np.uint8)
    classes, box = np.array([0]), np.array([[100, 100, 200, 200]])
    for score in (0.24, 0.75):
        found = make_detections(7, classes, np.array([score]), box)
        draw_detections([("a.jpg", image, classes, box, found)], ["cat"], tmp_path / "pairs.png", confidence=0.25)
        sheet = sheet_of(tmp_path / "pairs.png")
        assert tuple(sheet[LINE + 150, GAP + 200]) == class_color(0), "the label"
        shown = tuple(sheet[LINE + 150, SECOND + 200])
        assert shown == (class_color(0) if score > 0.25 else (90, 90, 90)), "the detection"


def test_targets_are_drawn_on_the_image_they_belong_to(tmp_path: Path) -> None:
    images = np.full((2, 3, SIDE, SIDE), 90, np.uint8)
    draw_targets(images, np.array([[1, 0, 200, 200, 100, 60]], np.float32), ["box"], tmp_path / "batch.png")
    sheet = sheet_of(tmp_path / "batch.png")
    assert not (sheet[LINE:, GAP : GAP + SIDE] == class_color(0)).all(-1).any(), "the first image has no boxes"
    assert tuple(sheet[LINE + 200, SECOND + 150]) == class_color(0)
