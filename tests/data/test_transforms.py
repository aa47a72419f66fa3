"""Geometry: boxes must land where their pixels land. Colour: the look-up tables must equal the formula."""

from __future__ import annotations

from dataclasses import replace

import cv2
import numpy as np
import pytest

from data import AugmentConfig, letterbox
from data.transforms import (
    PAD_VALUE,
    fit_matrix,
    jitter_hsv,
    mosaic_matrices,
    move_boxes,
    random_affine,
    scaled_size,
    visible_boxes,
    warp_into,
)


def extent(image: np.ndarray, colour: tuple[int, int, int], tolerance: int = 40) -> np.ndarray:
    """The xyxy box around the pixels of a colour; edges by how much of the colour the outermost pixels hold."""
    close = (np.abs(image.astype(int) - colour) <= tolerance).all(axis=2)
    rows, columns = np.flatnonzero(close.any(axis=1)), np.flatnonzero(close.any(axis=0))
    return np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1], dtype=float)


@pytest.mark.parametrize(
    ("image_size", "target", "upscale", "expected"),
    [
        ((480, 640), (416, 416), False, (312, 416)),
        ((640, 480), (416, 416), False, (416, 312)),
        ((100, 200), (416, 416), False, (100, 200)),
        ((100, 200), (416, 416), True, (208, 416)),
        ((427, 640), (320, 320), False, (214, 320)),
        ((1, 1000), (64, 64), False, (1, 64)),
        ((480, 640), (256, 416), False, (256, 341)),
    ],
)
def test_letterbox_geometry(image_size, target, upscale, expected) -> None:
    assert scaled_size(image_size, target, upscale) == expected
    image = np.full((*image_size, 3), 200, dtype=np.uint8)
    canvas, box = letterbox(image, target, upscale)
    assert canvas.shape == (*target, 3)
    assert box == (
        expected[1] / image_size[1],
        expected[0] / image_size[0],
        (target[1] - expected[1]) // 2,
        (target[0] - expected[0]) // 2,
    )
    inner = canvas[box.pad_y : box.pad_y + expected[0], box.pad_x : box.pad_x + expected[1]]
    assert (inner == 200).all()
    assert (canvas == 200).all(axis=2).sum() == expected[0] * expected[1]
    assert set(np.unique(canvas)) <= {PAD_VALUE, 200}


def test_letterbox_round_trip() -> None:
    generator = np.random.default_rng(1)
    for _ in range(50):
        height, width = generator.integers(20, 1500, 2)
        canvas_size = tuple(32 * generator.integers(2, 25, 2))
        canvas, box = letterbox(np.zeros((height, width, 3), np.uint8), canvas_size, bool(generator.integers(2)))
        boxes = (generator.random((5, 4)) * [width, height, width, height]).astype(np.float32)
        moved = box.to_network(boxes)
        assert (moved >= -0.01).all() and (moved <= np.array(canvas.shape[1::-1] * 2) + 0.01).all()
        assert np.abs(box.to_original(moved) - boxes).max() < 0.01


def test_letterbox_boxes_follow_pixels() -> None:
    image = np.zeros((300, 500, 3), dtype=np.uint8)
    image[60:180, 100:350] = 255
    canvas, box = letterbox(image, (256, 256), False)
    moved = box.to_network(np.array([[100, 60, 350, 180]], dtype=np.float32))[0]
    assert np.abs(extent(canvas, (255, 255, 255), 127) - moved).max() <= 0.5


def tiles(generator: np.random.Generator) -> tuple[list[np.ndarray], list[np.ndarray], list[tuple[int, int, int]]]:
    """Four dark images with one bright rectangle each, its box and its colour."""
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)]
    images, boxes = [], []
    for colour in colours:
        height, width = (int(side) for side in generator.integers(150, 500, 2))
        x, y = int(generator.integers(0, width // 2)), int(generator.integers(0, height // 2))
        w, h = int(generator.integers(width // 4, width // 2)), int(generator.integers(height // 4, height // 2))
        image = np.zeros((height, width, 3), dtype=np.uint8)
        image[y : y + h, x : x + w] = colour
        images.append(image)
        boxes.append(np.array([[x, y, x + w, y + h]], dtype=np.float32))
    return images, boxes, colours


def test_mosaic_boxes_follow_pixels(every_augment: AugmentConfig) -> None:
    upright = replace(every_augment, degrees=0, shear=0)  # a turned rectangle's clipped box is larger than its pixels
    seen = 0
    for seed in range(40):
        generator = np.random.default_rng(seed)
        images, boxes, colours = tiles(generator)
        target = (320, 416)
        placed = mosaic_matrices([image.shape[:2] for image in images], target, generator)
        affine = random_affine(upright, target, generator)
        canvas = np.full((*target, 3), PAD_VALUE, dtype=np.uint8)
        for image, matrix in zip(images, placed, strict=True):
            warp_into(canvas, image, affine @ matrix)
        for box, matrix, colour in zip(boxes, placed, colours, strict=True):
            clipped, kept = visible_boxes(move_boxes(box, affine @ matrix), target, 0.2)
            if kept[0] and (clipped[0, 2:] - clipped[0, :2]).min() > 4:
                assert np.abs(extent(canvas, colour, 127) - clipped[0]).max() <= 0.75, seed
                seen += 1
    assert seen > 50


def test_turned_boxes_follow_pixels(every_augment: AugmentConfig) -> None:
    inside = replace(every_augment, scale=0.2, translate=0.02)
    for seed in range(20):
        generator = np.random.default_rng(seed)
        image = np.zeros((200, 300, 3), dtype=np.uint8)
        image[80:130, 110:200] = 255
        matrix = random_affine(inside, (400, 400), generator) @ fit_matrix((200, 300), (400, 400))
        canvas = np.full((400, 400, 3), PAD_VALUE, dtype=np.uint8)
        warp_into(canvas, image, matrix)
        moved = move_boxes(np.array([[110, 80, 200, 130]], dtype=np.float32), matrix)[0]
        found = extent(canvas, (255, 255, 255), 100)
        # The sharp corners of a turned rectangle fill less than a pixel, so they are found a little inside.
        assert (found[:2] - moved[:2] > -1).all() and (moved[2:] - found[2:] > -1).all()
        assert np.abs(found - moved).max() < 3, seed


def test_warp_without_change_is_the_image(no_augment: AugmentConfig) -> None:
    generator = np.random.default_rng(0)
    image = generator.integers(0, 256, (64, 96, 3), dtype=np.uint8)
    canvas = np.full((96, 96, 3), PAD_VALUE, dtype=np.uint8)
    matrix = random_affine(no_augment, (96, 96), generator) @ fit_matrix((64, 96), (96, 96))
    warp_into(canvas, image, matrix)
    assert np.array_equal(canvas[16:80], image)
    assert (canvas[:16] == PAD_VALUE).all() and (canvas[80:] == PAD_VALUE).all()


def test_flips_are_exact_and_move_boxes(no_augment: AugmentConfig) -> None:
    generator = np.random.default_rng(0)
    image = generator.integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for flips, expected, box in (
        ({"flip_horizontal": 1}, image[:, ::-1], [44, 5, 54, 25]),
        ({"flip_vertical": 1}, image[::-1], [10, 39, 20, 59]),
    ):
        matrix = random_affine(replace(no_augment, **flips), (64, 64), generator) @ fit_matrix((64, 64), (64, 64))
        canvas = np.zeros((64, 64, 3), dtype=np.uint8)
        warp_into(canvas, image, matrix)
        assert np.array_equal(canvas, expected)
        assert move_boxes(np.array([[10, 5, 20, 25]], dtype=np.float32), matrix).tolist() == [box]


def test_warp_outside_the_canvas_draws_nothing() -> None:
    canvas = np.full((32, 32, 3), 7, dtype=np.uint8)
    for shift in (-200, 200):
        matrix = np.array([[1.0, 0, shift], [0, 1, 0], [0, 0, 1]])
        warp_into(canvas, np.zeros((50, 50, 3), dtype=np.uint8), matrix)
    assert (canvas == 7).all()


def test_mosaic_tiles_meet_in_the_middle_half() -> None:
    for seed in range(50):
        generator = np.random.default_rng(seed)
        sizes = [tuple(int(side) for side in generator.integers(50, 500, 2)) for _ in range(4)]
        matrices = mosaic_matrices(sizes, (200, 300), generator)
        corners = [
            matrix[:2] @ [x * size[1], y * size[0], 1]
            for matrix, size, (x, y) in zip(matrices, sizes, ((1, 1), (0, 1), (1, 0), (0, 0)), strict=True)
        ]
        assert np.allclose(corners, corners[0])
        assert abs(corners[0][0]) <= 150 and abs(corners[0][1]) <= 100
        for matrix, (height, width) in zip(matrices, sizes, strict=True):
            assert np.isclose(max(matrix[0, 0] * width / 300, matrix[1, 1] * height / 200), 1)


def test_affine_stays_in_its_ranges(every_augment: AugmentConfig) -> None:
    generator = np.random.default_rng(0)
    config = replace(every_augment, shear=0)
    matrices = np.stack([random_affine(config, (200, 300), generator) for _ in range(2000)])
    scale = np.sqrt(np.abs(np.linalg.det(matrices[:, :2, :2])))
    assert 0.5 <= scale.min() < 0.52 and 1.48 < scale.max() <= 1.5
    centre = matrices[:, :2, 2] / [300, 200]
    assert np.abs(centre - 0.5).max() <= 0.1 and np.abs(centre - 0.5).max() > 0.095
    angle = np.degrees(np.arctan2(np.abs(matrices[:, 1, 0]), np.abs(matrices[:, 0, 0])))
    assert 19 < angle.max() <= 20
    assert 0.45 < (np.linalg.det(matrices[:, :2, :2]) < 0).mean() < 0.55


def test_which_boxes_stay() -> None:
    boxes = np.array(
        [
            [10, 10, 50, 50],  # whole
            [-30, 10, 10, 50],  # a quarter
            [-36, 10, 4, 50],  # a tenth
            [10, 10, 12, 50],  # two pixels wide
            [10, 10, 13, 50],
            [0, 10, 90, 14],  # a sliver
            [200, 200, 240, 240],  # outside
        ],
        dtype=np.float32,
    )
    clipped, kept = visible_boxes(boxes, (80, 100), 0.2)
    assert kept.tolist() == [True, True, False, False, True, False, False]
    assert clipped[1].tolist() == [0, 10, 10, 50]


def test_hsv_equals_the_formula(no_augment: AugmentConfig) -> None:
    config = replace(no_augment, hsv_hue=0.1, hsv_saturation=0.7, hsv_value=0.4)
    image = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    for seed in range(5):
        gains = 1 + np.random.default_rng(seed).uniform(-1, 1, 3) * [0.1, 0.7, 0.4]
        hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV).astype(np.float64) * gains
        hsv[..., 0] %= 180
        expected = cv2.cvtColor(np.minimum(hsv, 255).astype(np.uint8), cv2.COLOR_HSV2RGB)
        changed = image.copy()
        jitter_hsv(changed, config, np.random.default_rng(seed))
        assert np.array_equal(changed, expected)


def test_hsv_without_gain_changes_nothing(no_augment: AugmentConfig) -> None:
    image = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    changed = image.copy()
    jitter_hsv(changed, no_augment, np.random.default_rng(0))
    assert np.array_equal(changed, image)
