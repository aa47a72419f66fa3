"""Files hold what was drawn, in order."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from train_utils.draw import DrawnFiles, class_color
from train_utils.errors import TrainError

NOTHING = (np.zeros((0, 4)), np.zeros(0, int), np.zeros(0))


def test_pictures_are_written_in_their_own_type_and_colours(tmp_path: Path) -> None:
    red = np.zeros((40, 60, 3), np.uint8)
    red[..., 0] = 255
    box = (np.array([[10.0, 10.0, 30.0, 30.0]]), np.array([1]), np.array([0.5]))
    with DrawnFiles(["a", "b"]) as files:
        for name in ("one.png", "deep/er/two.BMP", "three.jpg"):
            files.picture(tmp_path / name, red, *(NOTHING if name == "one.png" else box))
    assert np.array_equal(cv2.imread(str(tmp_path / "one.png"))[..., ::-1], red)
    drawn = cv2.imread(str(tmp_path / "deep" / "er" / "two.BMP"))[..., ::-1]
    assert tuple(drawn[30, 20]) == class_color(1) and tuple(drawn[35, 50]) == (255, 0, 0)
    assert (tmp_path / "three.jpg").read_bytes()[:2] == b"\xff\xd8"


def test_frames_become_videos_in_order(tmp_path: Path) -> None:
    with DrawnFiles(["a"]) as files:
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
        with DrawnFiles(["a"]) as files:
            files.picture(tmp_path / "file" / "a.png", image, *NOTHING)
    with pytest.raises(TrainError, match=r"cannot write .* with frames of 60 x 40"):
        with DrawnFiles(["a"]) as files:
            for side in (40, 60):
                files.frame(tmp_path / "a.mp4", 5.0, image[:, :side], *NOTHING)
