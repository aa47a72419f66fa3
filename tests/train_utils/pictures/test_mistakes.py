"""The sheets of errors show the images with most of them, with boxes where the errors are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from train_utils.pictures import mistakes
from train_utils.pictures.mistakes import FALSE, MISSED, RIGHT, draw_suspects, draw_worst
from train_utils.pictures.sheets import Cell, Group
from train_utils.scores.detections import Detections, GroundTruth, make_detections
from train_utils.scores.diagnosis import diagnose

NAMES = ["cat", "dog"]
LEFT, MIDDLE, RIGHT_SIDE = [10.0, 10, 60, 60], [100.0, 100, 60, 60], [200.0, 200, 60, 60]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[list[Group]]:
    """The sheets that are saved, in place of their files."""
    sheets: list[list[Group]] = []
    monkeypatch.setattr(mistakes, "save_sheet", lambda groups, *_: sheets.append(list(groups)))
    return sheets


def small_set() -> tuple[GroundTruth, Detections]:
    """Image 0 is found, 1 has two missed labels, 2 a false detection and a wrong class.

    Five false detections below .8 make that the score with the best F1.
    """
    boxes = np.array([LEFT, LEFT, MIDDLE, LEFT, RIGHT_SIDE])
    truth = GroundTruth(
        image_ids=np.array([7, 5, 9]), sizes=np.full((3, 2), 300), offsets=np.array([0, 1, 3, 5]), boxes_xywh=boxes,
        classes=np.array([0, 0, 1, 0, 1]), crowd=np.zeros(5, bool), areas=boxes[:, 2:].prod(1), names=NAMES,
    )  # fmt: skip

    def found(image: int, cls: int, score: float, x: float, y: float) -> Detections:
        return make_detections(image, np.array([cls]), np.array([score]), np.array([[x, y, x + 60, y + 60]]))

    right = [found(7, 0, 0.9, 10, 10), found(9, 0, 0.8, 10, 10)]
    wrong = [found(9, 0, 0.95, 100, 0), found(9, 0, 0.85, 200, 200)]
    low = [found(5, 1, 0.01, 100, 100), *[found(5, 0, 0.02, 230, 10)] * 5]
    return truth, np.concatenate([*right, *wrong, *low])


def read(position: int) -> np.ndarray:
    return np.full((300, 300, 3), position, np.uint8)


def boxes_of(cell: Cell) -> dict[str, tuple[list[float], tuple[int, int, int]]]:
    return {
        text: (box.tolist(), color)
        for text, box, color in zip(cell.names, cell.boxes_xyxy, cell.colors, strict=True)
    }  # fmt: skip


def test_images_with_most_errors_and_their_reasons(kept: list[list[Group]]) -> None:
    truth, found = small_set()
    diagnosis = diagnose(truth, found)
    assert diagnosis.threshold == pytest.approx(0.8)
    draw_worst(diagnosis, read, lambda i: f"{i}.jpg", Path("unused"))
    missed, false = kept[0]
    assert (missed.title, false.title) == ("1.jpg", "2.jpg"), "an image appears once"
    assert missed.cells[0].title == "0 right (green), 2 missed (red), 0 false (blue)"
    assert boxes_of(missed.cells[0]) == {
        "missed cat": ([10, 10, 70, 70], MISSED), "missed dog, found at 0.01": ([100, 100, 160, 160], MISSED),
    }  # fmt: skip
    assert false.cells[0].title == "1 right (green), 1 missed (red), 2 false (blue)"
    assert boxes_of(false.cells[0]) == {
        "missed dog": ([200, 200, 260, 260], MISSED), "cat 0.95: nothing there": ([100, 0, 160, 60], FALSE),
        "cat 0.85: is dog": ([200, 200, 260, 260], FALSE), "": ([10, 10, 70, 70], RIGHT),
    }  # fmt: skip
    assert (missed.cells[0].image == 1).all() and (false.cells[0].image == 2).all()


def test_only_the_first_errors_are_drawn_and_the_others_counted(
    kept: list[list[Group]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mistakes, "MOST_DRAWN", 1)
    truth, found = small_set()
    draw_worst(diagnose(truth, found), read, str, Path("unused"))
    assert list(boxes_of(kept[0][1].cells[0])) == ["missed dog", "cat 0.95: nothing there", ""]
    assert kept[0][1].cells[0].title.endswith(", 1 not drawn")
    perfect = found[:1]
    alone = GroundTruth(
        truth.image_ids[:1], truth.sizes[:1], truth.offsets[:2], truth.boxes_xywh[:1], truth.classes[:1],
        truth.crowd[:1], truth.areas[:1], NAMES,
    )  # fmt: skip
    draw_worst(diagnose(alone, perfect), read, str, Path("unused"))
    draw_suspects(diagnose(alone, perfect), read, str, Path("unused"))
    assert len(kept) == 1, "nothing is drawn where nothing is wrong"


def test_suspects_show_the_surroundings_of_what_contradicts_a_label(kept: list[list[Group]]) -> None:
    truth, found = small_set()
    draw_suspects(diagnose(truth, found), read, lambda i: f"{i}.jpg", Path("unused"))
    alone, other = kept[0]
    assert [group.cells[0].title for group in kept[0]] == [
        "cat 0.95 found, no label there", "cat 0.85 found, dog labelled",
    ]  # fmt: skip
    assert alone.title == other.title == "2.jpg"
    for group, corner in ((alone, [100, 0]), (other, [200, 200])):
        cell = group.cells[0]
        height, width = cell.image.shape[:2]
        assert 100 < height <= 150 and 100 < width <= 150
        origin = np.array(corner) - cell.boxes_xyxy[0, :2]
        assert (origin >= 0).all() and cell.boxes_xyxy.max() <= 150
    assert np.array_equal(*other.cells[0].boxes_xyxy) and len(alone.cells[0].boxes_xyxy) == 1
