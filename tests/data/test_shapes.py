"""Drawn shapes: boxes that fit the pixels, objects that stay in sight."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np

from data import ShapesConfig, ensure_shapes
from data.shapes import CLASSES, draw_image

SMALL = ShapesConfig(train_images=6, val_images=3, image_size=128)


def test_boxes_and_areas_are_those_of_the_visible_pixels() -> None:
    generator = np.random.default_rng(0)
    objects, kinds = 0, set()
    for _ in range(60):
        drawing = draw_image(128, generator)
        height, width = drawing.image.shape[:2]
        assert 0.69 * 128**2 < height * width < 1.31 * 128**2
        assert np.sum(drawing.masks or [[0]], axis=0, dtype=int).max() <= 1, "every pixel once"
        for kind, mask in zip(drawing.classes, drawing.masks, strict=True):
            left, top, w, h = cv2.boundingRect(mask.astype(np.uint8))
            inner = mask[top : top + h, left : left + w]
            assert inner.sum() == mask.sum() > 0
            assert inner[0].any() and inner[-1].any() and inner[:, 0].any() and inner[:, -1].any(), "tight"
            objects += 1
            kinds.add(kind)
    assert objects > 150 and kinds == set(range(len(CLASSES)))


def digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(
        b"".join(str(path.relative_to(folder)).encode() + path.read_bytes() for path in files)
    ).hexdigest()


def test_same_settings_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = ensure_shapes(tmp_path / "a", SMALL), ensure_shapes(tmp_path / "b", SMALL)
    assert first.name == second.name and digest(first) == digest(second)
    stamp = first.stat().st_mtime_ns
    assert ensure_shapes(tmp_path / "a", SMALL) == first and first.stat().st_mtime_ns == stamp, "drawn once"
    other = ensure_shapes(tmp_path / "a", replace(SMALL, val_images=4))
    assert other != first and digest(other) != digest(first) and len(list((tmp_path / "a").iterdir())) == 2
    more = ensure_shapes(tmp_path / "a", replace(SMALL, train_images=7))
    assert (more / "train" / "000003.jpg").read_bytes() == (first / "train" / "000003.jpg").read_bytes()
    drawing = draw_image(128, np.random.Generator(np.random.PCG64(np.random.SeedSequence([0, 0, 2]))))
    expected = [
        ([*cv2.boundingRect(mask.astype(np.uint8))], mask.sum(), kind + 1)
        for kind, mask in zip(*drawing[1:], strict=True)
    ]
    rows = json.loads((first / "annotations" / "instances_train.json").read_text())["annotations"]
    assert expected == [(row["bbox"], row["area"], row["category_id"]) for row in rows if row["image_id"] == 3] != []
    stored = cv2.imread(str(first / "train" / "000003.jpg"), cv2.IMREAD_COLOR_RGB)
    assert np.abs(stored - drawing.image.astype(float)).mean() < 8
    assert (more / "train" / "000001.jpg").read_bytes() != (more / "val" / "000001.jpg").read_bytes()
