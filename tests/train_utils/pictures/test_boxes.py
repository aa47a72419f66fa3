"""Boxes and their names are drawn where they are, and can be read."""

from __future__ import annotations

import numpy as np
import pytest

from train_utils.draw import class_color, draw_boxes


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


def test_names_of_crowded_boxes_do_not_cover_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train_utils.draw.class_color", lambda _: (0, 0, 200))
    crowd = np.array([[20 + 12 * i, 80 + 5 * i, 120 + 12 * i, 150 + 5 * i] for i in range(6)], float)
    names = [f"thing {i}" for i in range(6)]
    image = np.zeros((300, 300, 3), np.uint8)

    def texts(chosen: slice) -> int:
        """Pixels of letters, which are black or white, on blue plates."""
        drawn = draw_boxes(image + 128, crowd[chosen], np.arange(6)[chosen], names)
        return int((drawn == 255).all(-1).sum())

    assert texts(slice(6)) == sum(texts(slice(i, i + 1)) for i in range(6)) > 0


def test_lines_and_names_grow_with_the_picture_and_leave_small_ones_free() -> None:
    """Shares of the picture: a line is 0.4 to 1 % of it at any size."""
    for side, named in ((100, False), (640, True), (2600, True)):
        image = np.full((side, side, 1), 40, np.uint8).repeat(3, axis=2)
        box = np.array([[0.1, 0.5, 0.9, 0.9]]) * side
        drawn = draw_boxes(image, box, np.array([0]), ["dog"], np.array([0.9]))
        changed = (drawn != 40).any(axis=2)
        assert 0.004 <= changed[round(0.6 * side) : round(0.8 * side), : side // 2].sum(axis=1).max() / side <= 0.01
        above = changed[: round(0.49 * side)].any(axis=1).sum() / side
        assert (0.01 < above < 0.03) if named else above == 0, (side, above)
