"""Boxes are drawn where they are, and files hold what was drawn, in order."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from train_utils.errors import TrainError
from train_utils.pictures.boxes import DrawnFiles, class_color, draw_boxes

NOTHING = (np.zeros((0, 4)), np.zeros(0, int), np.zeros(0))


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


def test_a_name_at_the_edge_is_moved_into_the_picture_and_the_best_box_lies_on_top() -> None:
    image = np.full((200, 300, 3), 40, np.uint8)
    corner = np.array([[270.0, 0.0, 300.0, 90.0]])
    drawn = draw_boxes(image, corner, np.array([0]), ["a long name"], np.array([0.9]))
    assert (drawn[5, 200:270] != 40).any(), "the name was cut off at the right edge"
    twice = np.array([[50.0, 60.0, 150.0, 160.0]] * 2)
    drawn = draw_boxes(image, twice, np.array([1, 0]), ["worse", "better"], np.array([0.9, 0.2]))
    assert tuple(drawn[160, 100]) == class_color(1)


def test_pictures_are_written_in_their_own_type_and_colours(tmp_path: Path) -> None:
    red = np.zeros((40, 60, 3), np.uint8)
    red[..., 0] = 255
    box = (np.array([[10.0, 10.0, 30.0, 30.0]]), np.array([1]), np.array([0.5]))
    with DrawnFiles(["a", "b"], threads=2) as files:
        for name in ("one.png", "deep/er/two.BMP", "three.jpg"):
            files.picture(tmp_path / name, red, *(NOTHING if name == "one.png" else box))
    assert np.array_equal(cv2.imread(str(tmp_path / "one.png"))[..., ::-1], red)
    drawn = cv2.imread(str(tmp_path / "deep" / "er" / "two.BMP"))[..., ::-1]
    assert tuple(drawn[30, 20]) == class_color(1) and tuple(drawn[35, 50]) == (255, 0, 0)
    assert (tmp_path / "three.jpg").read_bytes()[:2] == b"\xff\xd8"


def test_frames_become_videos_in_order(tmp_path: Path) -> None:
    with DrawnFiles(["a"], threads=4) as files:
        for name, rate in (("one.mp4", 12.5), ("two.mp4", 29.97)):
            for number in range(30):
                files.frame(tmp_path / name, rate, np.full((48, 64, 3), 8 * number, np.uint8), *NOTHING)
    for name, rate in (("one.mp4", 12.5), ("two.mp4", 29.97)):
        video = cv2.VideoCapture(str(tmp_path / name))
        assert video.get(cv2.CAP_PROP_FPS) == pytest.approx(rate, abs=1e-3)
        greys = [video.read()[1].mean() for _ in range(30)]
        assert np.abs(np.array(greys) - 8 * np.arange(30)).max() < 5 and not video.read()[0]


def test_what_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    image = np.zeros((40, 60, 3), np.uint8)
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match=r"cannot write .*file/a.png.* fix: another out="):
        with DrawnFiles(["a"], threads=2) as files:
            files.picture(tmp_path / "file" / "a.png", image, *NOTHING)
    with pytest.raises(TrainError, match="does not give its frame rate"):
        with DrawnFiles(["a"], threads=2) as files:
            files.frame(tmp_path / "a.mp4", 0.0, image, *NOTHING)
    with pytest.raises(TrainError, match="differ in size"):
        with DrawnFiles(["a"], threads=2) as files:
            for side in (40, 60):
                files.frame(tmp_path / "a.mp4", 5.0, image[:, :side], *NOTHING)
