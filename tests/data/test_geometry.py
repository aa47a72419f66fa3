"""Boxes land where their pixels land; flips mirror one axis each."""

from dataclasses import replace

import cv2
import numpy as np
import pytest

from data import Resize
from data.geometry import PAD_VALUE, resize_into, scaled_size, visible_boxes
from data.plan import random_affine
from tests.data.conftest import NO_AUGMENT


@pytest.mark.parametrize(
    ("image_size", "target", "expected"),
    [
        ((480, 640), (416, 416), (312, 416)),
        ((1, 1000), (64, 64), (1, 64)),
        ((480, 641), (256, 416), (256, 342)),
        ((60, 64), (64, 64), (60, 64)),
        ((30, 40), (64, 64), (48, 64)),
    ],
)
def test_a_letterbox_fits_centred_on_grey(image_size, target, expected) -> None:
    assert scaled_size(image_size, target) == expected
    image = np.random.default_rng(0).integers(0, 256, (*image_size, 3), np.uint8)
    canvas = np.empty((*target, 3), dtype=np.uint8)
    box = resize_into(canvas, image, Resize.letterbox)
    left, top = (target[1] - expected[1]) // 2, (target[0] - expected[0]) // 2
    assert box == (expected[1] / image_size[1], expected[0] / image_size[0], left, top)
    framed = np.full((*target, 3), PAD_VALUE, dtype=np.uint8)
    how = cv2.INTER_AREA if expected < image_size else cv2.INTER_LINEAR
    framed[top : top + expected[0], left : left + expected[1]] = cv2.resize(image, expected[::-1], interpolation=how)
    assert np.array_equal(canvas, framed)
    assert resize_into(canvas, image, Resize.stretch)[2:] == (0, 0)
    assert np.array_equal(canvas, cv2.resize(image, target[::-1]))


@pytest.mark.parametrize("resize", list(Resize))
def test_boxes_follow_the_pixels_there_and_back(resize: Resize) -> None:
    image = np.zeros((300, 500, 3), dtype=np.uint8)
    image[60:180, 100:350] = 255
    canvas = np.empty((256, 256, 3), dtype=np.uint8)
    moved = resize_into(canvas, image, resize).to_network(np.array([[100, 60, 350, 180]], dtype=np.float32))[0]
    rows, columns = (np.flatnonzero((canvas[..., 0] > 127).any(axis=axis)) for axis in (1, 0))
    assert np.abs(np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]) - moved).max() <= 0.5
    generator = np.random.default_rng(1)
    for _ in range(50):
        height, width = generator.integers(20, 1500, 2)
        canvas = np.empty((*(32 * generator.integers(2, 25, 2)), 3), dtype=np.uint8)
        box = resize_into(canvas, np.zeros((height, width, 3), np.uint8), resize)
        boxes = (generator.random((5, 4)) * [width, height, width, height]).astype(np.float32)
        moved = box.to_network(boxes)
        assert (moved >= -0.01).all() and (moved <= np.array(canvas.shape[1::-1] * 2) + 0.01).all()
        assert np.abs(box.to_original(moved) - boxes).max() < 0.01


def test_which_boxes_stay() -> None:
    boxes = np.array(
        [
            [10, 10, 50, 50],  # whole
            [-30, 10, 10, 50],  # a quarter
            [-33, 10, 7, 50],  # a sixth
            [10, 10, 12, 50],  # two pixels wide
            [10, 10, 12.5, 50],
            [0, 10, 90, 13],  # thin, but all of it
            [200, 200, 240, 240],  # outside
        ],
        dtype=np.float32,
    )
    clipped, usable = visible_boxes(boxes, (80, 100))
    assert usable.tolist() == [True, True, False, False, True, True, False]
    assert clipped[[1, 6]].tolist() == [[0, 10, 10, 50], [100, 80, 100, 80]]


@pytest.mark.parametrize(("flips", "point"), [((1.0, 0.0), (-3, 5)), ((0.0, 1.0), (3, -5)), ((1.0, 1.0), (-3, -5))])
def test_each_flip_mirrors_its_own_axis(flips: tuple[float, float], point: tuple[int, int]) -> None:
    augment = replace(NO_AUGMENT, flip_horizontal=flips[0], flip_vertical=flips[1])
    matrix = random_affine(augment, (60, 100), np.random.default_rng(0))
    assert (matrix @ [3, 5, 1]).tolist() == [50 + point[0], 30 + point[1], 1]


def test_what_is_drawn_reaches_both_ends_of_its_range_and_has_its_middle_there() -> None:
    augment, drawn = replace(NO_AUGMENT, scale=0.5, translate=0.1), np.random.default_rng(0)
    matrices = np.array([random_affine(augment, (100, 50), drawn) for _ in range(4000)])
    zooms, shifts_x, shifts_y = matrices[:, 0, 0], matrices[:, 0, 2], matrices[:, 1, 2]
    for values, low, high in ((zooms, 0.5, 1.5), (shifts_x, 20, 30), (shifts_y, 40, 60)):
        assert low <= values.min() < low + 0.01 * (high - low) and high >= values.max() > high - 0.01 * (high - low)
        assert abs(values.mean() - (low + high) / 2) < 0.02 * (high - low)
    turned = [random_affine(replace(NO_AUGMENT, degrees=20), (64, 64), drawn) for _ in range(500)]
    angles = np.degrees([np.arctan2(matrix[1, 0], matrix[0, 0]) for matrix in turned])
    assert -20 <= angles.min() < -19 and 19 < angles.max() <= 20
    sheared = np.array([random_affine(replace(NO_AUGMENT, shear=20), (64, 64), drawn) for _ in range(500)])
    slants = np.degrees(np.arctan([sheared[:, 0, 1], sheared[:, 1, 0]]))
    assert np.ptp(slants, axis=1) == pytest.approx(40, rel=0.03) and abs(np.corrcoef(*slants)[0, 1]) < 0.15
