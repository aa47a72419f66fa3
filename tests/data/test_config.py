"""Values that make no sense are refused with the full key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from data import AugmentConfig, DataFormat, ShapesConfig


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mosaic", 1.1),
        ("flip_horizontal", -0.1),
        ("hsv_hue", 2),
        ("scale", 1),
        ("translate", -0.1),
        ("shear", 90),
        ("degrees", 181),
        ("close_mosaic_epochs", -1),
        ("scale", float("nan")),
    ],
)
def test_augment(key: str, value: float, no_augment: AugmentConfig) -> None:
    with pytest.raises(ValueError, match=rf"^augment.{key} must .*, got {value}$"):
        replace(no_augment, **{key: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": -1}, r"data.workers must be 0 or more, or auto, got -1"),
        ({"format": DataFormat.shapes}, r"data.format=shapes needs data.shapes"),
        ({"format": DataFormat.voc}, r"data.format=voc needs data.names"),
        ({"names": []}, r"data.names must be a list with at least one class"),
        ({"names": ["a", "b", "a"]}, r"data.names lists 'a' twice"),
    ],
)
def test_data(changes: dict[str, Any], message: str, coco_set) -> None:
    with pytest.raises(ValueError, match=message):
        replace(coco_set.config, **changes)


@pytest.mark.parametrize("key", ["train_images", "val_images", "image_size"])
def test_shapes(key: str) -> None:
    with pytest.raises(ValueError, match=rf"data.shapes.{key} must .*, got -1"):
        replace(ShapesConfig(1, 1, 128), **{key: -1})
