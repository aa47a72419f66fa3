"""Boxes, sheets and drawn files show what they were given, where it is, and can be read."""

import resource
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from conf import TrainError
from data import Batch
from train_utils.report.draw import GAP, LINE, SIDE, DrawnFiles, class_color, draw_boxes, draw_targets


def test_a_box_is_drawn_on_its_edge_the_best_on_top_and_the_image_is_left_alone() -> None:
    image = np.full((200, 300, 3), 40, np.uint8)
    drawn = draw_boxes(image, np.array([[50.0, 60.0, 150.0, 160.0]]), np.array([2]), ["a", "b", "cat"], np.array([0.9]))
    assert (image == 40).all()
    for x, y in ((50, 100), (150, 100), (100, 160)):
        assert tuple(drawn[y, x]) == class_color(2)
    assert (drawn[80:150, 70:140] == 40).all(), "the inside is covered"
    assert (drawn[:60, 50:100] != 40).any(), "no name above the box"
    twice = np.array([[50.0, 60.0, 150.0, 160.0]] * 2)
    drawn = draw_boxes(image, twice, np.array([1, 0]), ["worse", "better"], np.array([0.9, 0.2]))
    assert tuple(drawn[160, 100]) == class_color(1)


SECOND = 2 * GAP + SIDE  # left edge of the second cell


def sheet_of(path: Path) -> np.ndarray:
    picture = cv2.imread(str(path))
    assert picture is not None
    return picture[..., ::-1].astype(int)


def test_targets_are_drawn_on_the_image_they_belong_to(tmp_path: Path) -> None:
    images, targets = torch.full((2, 3, SIDE, SIDE), 90).byte(), torch.tensor([[1, 0, 200, 200, 100, 60.0]])
    draw_targets(Batch(images, targets, torch.arange(2)), ["box"], tmp_path / "batch.png")
    sheet = sheet_of(tmp_path / "batch.png")
    assert not (sheet[LINE:, GAP : GAP + SIDE] == class_color(0)).all(-1).any(), "the first image has no boxes"
    assert tuple(sheet[LINE + 200, SECOND + 150]) == class_color(0)


def plot(image: np.ndarray, *boxes: float) -> Callable[[], np.ndarray]:
    """A function that draws a box of class 1, if there is one."""
    columns = np.array(boxes).reshape(-1, 4), np.ones(len(boxes) // 4, int), ["a", "b"]
    return lambda: draw_boxes(image, *columns)[..., ::-1]


def test_pictures_are_written_in_their_own_type_and_colours(tmp_path: Path) -> None:
    red = np.zeros((40, 60, 3), np.uint8)
    red[..., 0] = 255
    with DrawnFiles() as files:
        for name, box in (("one.png", []), ("deep/er/two.BMP", [10, 10, 30, 30]), ("three.jpg", [])):
            files.picture(tmp_path / name, plot(red, *box))
    assert np.array_equal(cv2.imread(str(tmp_path / "one.png"))[..., ::-1], red)
    drawn = cv2.imread(str(tmp_path / "deep" / "er" / "two.BMP"))[..., ::-1]
    assert tuple(drawn[30, 20]) == class_color(1) and tuple(drawn[35, 50]) == (255, 0, 0)
    assert (tmp_path / "three.jpg").read_bytes()[:2] == b"\xff\xd8"


def test_what_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    image = np.zeros((40, 60, 3), np.uint8)
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match=r"cannot write .*file/a.png.* fix: .*another out="):
        with DrawnFiles() as files:
            files.picture(tmp_path / "file" / "a.png", plot(image))
    with pytest.raises(TrainError, match=r"cannot write .* with frames of 60 x 40"):
        with DrawnFiles() as files:
            for side in (40, 60):
                files.frame(tmp_path / "a.mp4", 5.0, 0.0, plot(image[:, :side]))
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, most[1]))  # as on a full disk
    try:
        for names in ("b", "bc"):  # the last one, and one that another follows
            with pytest.raises(TrainError, match=r"cannot write all frames of .*b\.mp4"), DrawnFiles() as files:
                for number in range(9 * len(names)):
                    files.frame(tmp_path / f"{names[number // 9]}.mp4", 5.0, number % 9 / 5, plot(image))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)


def test_a_video_keeps_the_frames_whose_times_start_again(tmp_path: Path) -> None:
    with DrawnFiles() as files:
        for seconds in (*range(70), *range(10)):
            files.frame(tmp_path / "a.mp4", 1.0, seconds, plot(np.zeros((48, 64, 3), np.uint8)))
    assert cv2.VideoCapture(str(tmp_path / "a.mp4")).get(cv2.CAP_PROP_FRAME_COUNT) == 80
