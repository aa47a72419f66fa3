"""A small COCO data set in tmp_path that tests can modify."""

import json
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from data import Annotations, AugmentConfig, Colour, DataFormat, ImageSource, OnError, open_annotations
from data.samplers import MultiScale, TrainBatchSampler, TrainSampler
from tests.data.sets import YoloSet, config_of

NO_AUGMENT = AugmentConfig(**dict.fromkeys((field.name for field in fields(AugmentConfig)), 0) | {"colour": Colour.cpu})
EVERY_AUGMENT = replace(
    NO_AUGMENT, mosaic=1, degrees=20, translate=0.1, scale=0.5, shear=5, flip_horizontal=0.5, flip_vertical=0.5,
    hsv_hue=0.0138, hsv_saturation=0.678, hsv_value=0.36,
)  # fmt: skip
FIXED = MultiScale(64, 1, 1, 32, 0)
Damage = Callable[[Path], object]


def flipped(file: Path, place: int) -> None:
    """Flip a bit of the byte at ``place``, which may count from the end."""
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(content)


DAMAGES: dict[str, Damage] = {
    "first byte": lambda file: flipped(file, 0),
    "middle byte": lambda file: flipped(file, file.stat().st_size // 2),
    "last byte": lambda file: flipped(file, -1),
    "last byte lost": lambda file: os.truncate(file, file.stat().st_size - 1),
    "empty": lambda file: os.truncate(file, 0),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "lost": Path.unlink,
}


def sampler_of(num_images: int, batch_size: int, sizes: MultiScale = FIXED, **more: Any) -> TrainBatchSampler:
    options: dict[str, Any] = {"num_replicas": 1, "rank": 0, "seed": 0, "batch_size": batch_size, **more}
    return TrainBatchSampler(TrainSampler(num_images, sizes, **options))


class CocoSet:
    """Images as PNG files and their annotations as a dictionary; ``save`` writes the json."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "images").mkdir(parents=True)
        self.json: dict[str, Any] = {
            "images": [],
            "annotations": [],
            "categories": [{"id": 3, "name": "cat"}, {"id": 1, "name": "dog"}, {"id": 7, "name": "bird"}],
        }
        config = config_of(root, DataFormat.coco, "instances.json", "images", None)
        self.config = replace(config, index_dir=str(root / "index"))

    def add_image(self, image: np.ndarray, boxes: list[tuple[int, list[float]]], **more: Any) -> None:
        """Add an RGB image and its (category id, xywh) boxes; annotations also get ``more``."""
        number = 10 + len(self.json["images"])
        name = f"{number}.png"
        assert cv2.imwrite(str(self.root / "images" / name), image[..., ::-1])
        height, width = image.shape[:2]
        self.json["images"].append({"id": number, "file_name": name, "height": height, "width": width})
        for category, box in boxes:
            record = {"id": len(self.json["annotations"]) + 100, "image_id": number, "category_id": category}
            self.json["annotations"].append(record | {"bbox": box, "area": box[2] * box[3], "iscrowd": 0} | more)

    def save(self) -> None:
        path, text = self.root / "instances.json", json.dumps(self.json)
        if not path.exists() or path.read_text() != text:  # another date is another index
            path.write_text(text)

    def open(self, part: str = "train", **changes: Any) -> Annotations:
        """Write the json and open it with changes to the configuration."""
        self.save()
        return open_annotations(replace(self.config, **changes), part)

    def source(self, **changes: Any) -> ImageSource:
        on_error = changes.get("on_error", OnError.stop)
        return ImageSource(self.open(**changes), on_error)


@pytest.fixture
def empty_set(tmp_path: Path) -> CocoSet:
    return CocoSet(tmp_path / "set")


@pytest.fixture
def coco_set(empty_set: CocoSet) -> CocoSet:
    """Seven noisy images of different sizes, with 0 to 3 boxes each."""
    generator = np.random.default_rng(0)
    for number in range(7):
        height, width = (int(side) for side in generator.integers(40, 90, 2))
        boxes = [
            ((1, 3, 7)[int(generator.integers(3))], [float(v) for v in (*generator.uniform(0, 15, 2), 20.25, 16.5)])
            for _ in range(number % 4)
        ]
        empty_set.add_image(generator.integers(0, 256, (height, width, 3), dtype=np.uint8), boxes)
    return empty_set


@pytest.fixture
def yolo_set(tmp_path: Path) -> YoloSet:
    return YoloSet(tmp_path / "set")
