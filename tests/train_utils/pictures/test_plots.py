"""The folder of plots: each is drawn whatever the data, and one that fails harms nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.train_utils.coco_sets import draw, many_classes
from train_utils import plots
from train_utils.detections import Detections, GroundTruth
from train_utils.plots import PLOTS, draw_evaluation, draw_training

OF_TRAINING = {"curves.png"}


def read(position: int) -> np.ndarray | None:
    """Grey pictures; one is unreadable."""
    return np.full((500, 500, 3), 90, np.uint8) if position != 2 else None


def drawn(truth: GroundTruth, found: Detections, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The pictures by name, and what was said."""
    said: list[str] = []
    draw_evaluation(folder, truth, found, read, lambda i: f"{i}.jpg", said.append)
    pictures = {path.name: cv2.imread(str(path)) for path in folder.iterdir()}
    for name, picture in pictures.items():
        assert picture is not None and picture.std() > 3, f"{name} is empty"
    return pictures, said


def test_each_plot_is_a_picture(tmp_path: Path) -> None:
    pictures, said = drawn(*many_classes(3), tmp_path / "plots")
    assert set(pictures) == set(PLOTS) - OF_TRAINING and not said


def test_one_and_many_classes_nothing_found_and_nothing_labelled(tmp_path: Path, kept: list[Figure]) -> None:
    truth, found = draw(1)
    empty = {key: getattr(truth, key)[:0] for key in ("boxes_xywh", "classes", "crowd", "areas")}
    unlabelled = GroundTruth(truth.image_ids, truth.sizes, np.zeros_like(truth.offsets), names=truth.names, **empty)
    charts = [name for name in PLOTS if name.endswith(".png") and name not in OF_TRAINING]
    cases = [many_classes(1), many_classes(80), (truth, found[:0]), (unlabelled, found), (unlabelled, found[:0])]
    for number, case in enumerate(cases):
        _, said = drawn(*case, tmp_path / str(number))
        assert len(kept) == (number + 1) * len(charts) and not said
    assert max(figure.get_size_inches().max() for figure in kept) < 20, "a chart is larger than a screen"


def test_a_plot_that_fails_is_said_and_the_others_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(plots, "draw_confusion", fail)
    (tmp_path / "confusion.png").write_text("of an earlier run")
    pictures, said = drawn(*draw(1), tmp_path)
    assert set(pictures) == {"precision_recall.png", "val_detections.jpg"}
    assert said == [f"warning: {tmp_path / 'confusion.png'} was not drawn (MemoryError: no room)"]
    (tmp_path / "file").write_text("")
    draw_training(tmp_path / "file", tmp_path / "metrics.csv", said.append)
    assert [line.split(" (")[0].rpartition("/")[2] for line in said[1:]] == ["curves.png was not drawn"]


def test_plots_of_a_training(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("epoch,step,lr,loss,AP\n1,10,0.01,5.5,0.1\n")
    said: list[str] = []
    draw_training(tmp_path / "plots", tmp_path / "metrics.csv", said.append)
    assert {path.name for path in (tmp_path / "plots").iterdir()} == OF_TRAINING and not said
