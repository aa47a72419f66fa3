"""Drawn shapes: boxes that fit the pixels, objects that stay in sight."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from data import shapes
from data.shapes import CLASSES, LEAST_VISIBLE, draw_image, visible_box


def test_boxes_and_areas_are_those_of_the_visible_pixels() -> None:
    generator = np.random.default_rng(0)
    objects, aspects, kinds = 0, [], set()
    for _ in range(60):
        drawing = draw_image(128, generator)
        height, width = drawing.image.shape[:2]
        aspects.append(height / width)
        assert 0.69 * 128**2 < height * width < 1.31 * 128**2
        assert np.sum(drawing.masks or [[0]], axis=0, dtype=int).max() <= 1, "every pixel once"
        for kind, mask in zip(drawing.classes, drawing.masks, strict=True):
            left, top, w, h = visible_box(mask)
            inner = mask[top : top + h, left : left + w]
            assert inner.sum() == mask.sum() > 0
            assert inner[0].any() and inner[-1].any() and inner[:, 0].any() and inner[:, -1].any(), "tight"
            objects += 1
            kinds.add(kind)
    assert objects > 150 and kinds == set(range(len(CLASSES)))
    assert 0.58 < min(aspects) < 0.75 and 1.35 < max(aspects) < 1.63


def test_objects_stand_out_from_what_is_around_them() -> None:
    generator = np.random.default_rng(1)
    for _ in range(20):
        drawing = draw_image(128, generator)
        for mask in drawing.masks:
            grown = cv2.dilate(mask.astype(np.uint8), np.ones((5, 5))).astype(bool) & ~mask
            inside, around = (np.median(drawing.image[part], axis=0) for part in (mask, grown))
            assert np.abs(inside - around).max() > 15


def test_enough_of_every_object_stays_in_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with the full masks as they were placed, before others covered them."""
    placed: list[np.ndarray] = []
    original = shapes._place

    def recording(*arguments):
        mask = original(*arguments)
        if mask is not None:
            placed.append(mask)
        return mask

    monkeypatch.setattr(shapes, "_place", recording)
    generator = np.random.default_rng(2)
    covered = 0
    for _ in range(40):
        placed.clear()
        drawing = draw_image(128, generator)
        shares = [mask.sum() / full.sum() for mask, full in zip(drawing.masks, placed, strict=True)]
        assert all(share >= LEAST_VISIBLE for share in shares)
        covered += sum(share < 1 for share in shares)
    assert covered > 10
