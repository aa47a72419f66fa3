"""Sheets show the images and boxes they are given, at the right place."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from train_utils.pictures.boxes import class_color
from train_utils.pictures.sheets import (
    GAP,
    GROUP,
    LINE,
    MARGIN,
    PAGE,
    Cell,
    Group,
    draw_detections,
    draw_targets,
    save_sheet,
)  # fmt: skip
from train_utils.scores.detections import make_detections

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
    picture = pages[0][MARGIN + 2 * LINE + GAP :, MARGIN + GAP :][:400, :400]
    assert tuple(picture[200, 100]) == class_color(0), "no box"
    name = picture[70:100, 100:160]
    assert (name != 90).any(), "no name above the box"


def test_detections_stand_beside_the_labels_of_their_picture_and_none_is_said(tmp_path: Path) -> None:
    image = np.full((440, 440, 3), 90, np.uint8)
    classes, box = np.array([0]), np.array([[100, 100, 200, 200]])
    sheets = []
    for score in (0.24, 0.75):
        found = make_detections(7, classes, np.array([score]), box)
        draw_detections([("a.jpg", image, classes, box, found)], ["cat"], tmp_path / "pairs.png", confidence=0.25)
        sheets.append(sheet_of(tmp_path / "pairs.png"))
    top, left, right = MARGIN + 2 * LINE + GAP, MARGIN + GAP, MARGIN + 2 * GAP + 440
    for sheet in sheets:
        assert tuple(sheet[top + 150, left + 200]) == class_color(0), "the label"
    assert tuple(sheets[1][top + 150, right + 200]) == class_color(0), "the detection"
    assert (sheets[0][top + 150, right + 200] == 90).all(), "it is below 0.25"
    said = sheets[0][top + 190 : top + 250, right + 100 : right + 340]
    assert (said == PAGE).all(-1).any() and (said == 0).all(-1).any(), "nothing is said on the empty side"


def test_a_long_file_name_keeps_its_end_and_stays_in_its_place(tmp_path: Path) -> None:
    def page(title: str) -> np.ndarray:
        cell = Cell(np.full((40, 40, 3), 90, np.uint8), *NO_BOXES, names=[], title=title)
        save_sheet([Group([cell])], 1, tmp_path / "page.png", side=100)
        return sheet_of(tmp_path / "page.png")

    short, long, other_start, other_end = map(
        page, ("7.jpg", "x" * 99 + "7.jpg", "yx" * 50 + "x" * 49 + "7.jpg", "x" * 99 + "8.jpg")
    )
    for sheet in (short, long):
        assert (sheet[:, -MARGIN:] == PAGE).all() and (sheet[MARGIN : MARGIN + LINE] != GROUP).any()
    assert np.array_equal(long, other_start), "the start of a long name shows"
    assert not np.array_equal(long, other_end), "its end does not show"


def test_targets_are_drawn_on_the_image_they_belong_to(tmp_path: Path) -> None:
    images = np.full((2, 3, 440, 440), 90, np.uint8)
    draw_targets(images, np.array([[1, 0, 200, 200, 100, 60]], np.float32), ["box"], tmp_path / "batch.png")
    sheet = sheet_of(tmp_path / "batch.png")
    first, second, top = MARGIN + GAP, 2 * MARGIN + 3 * GAP + 440, MARGIN + GAP
    assert not (sheet[top:, first : first + 440] == class_color(0)).all(-1).any(), "the first image has no boxes"
    assert tuple(sheet[top + 200, second + 150]) == class_color(0)
