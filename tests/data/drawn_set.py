"""A small set without a fault, as COCO and as YOLO, into which tests plant faults."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from data import DataConfig, DataFormat, OnError, SplitConfig
from tests.data.sets import config_of

HEIGHT, WIDTH = 96, 128
IMAGES = {"train": 5, "val": 3}
BOX = [20, 30, 40, 24]  # x, y, w, h


def picture(generator: np.random.Generator) -> np.ndarray:
    """Coloured clouds, as smooth as photographs are."""
    blocks = generator.integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return np.asarray(cv2.resize(blocks, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC))


class DrawnSet:
    """Faultless training and validation sets in both formats.

    The JPEG files are ``images/<split>/<number>.jpg``; there are two classes.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        generator = np.random.default_rng(0)
        self.json: dict[str, Any] = {}
        for split, count in IMAGES.items():
            for kind in ("images", "labels"):
                (root / kind / split).mkdir(parents=True)
            content: dict[str, Any] = {"images": [], "annotations": []}
            self.json[split] = content | {"categories": [{"id": 1, "name": "cat"}, {"id": 5, "name": "dog"}]}
            for number in range(count):
                self.add(split, number, picture(generator))

    def add(self, split: str, number: int, image: np.ndarray) -> None:
        assert cv2.imwrite(str(self.image(split, number)), image, [cv2.IMWRITE_JPEG_QUALITY, 95])
        size = {"height": image.shape[0], "width": image.shape[1]}
        self.json[split]["images"].append({"id": number, "file_name": f"{number}.jpg"} | size)
        rows = []
        for which in (0, 1):
            box = [BOX[0] + number, BOX[1] + 10 * which, *BOX[2:]]
            self.json[split]["annotations"].append(
                {"id": 10 * number + which, "image_id": number, "category_id": (1, 5)[which], "bbox": box}
            )
            x, y, w, h = box
            rows.append(f"{which} {(x + w / 2) / WIDTH} {(y + h / 2) / HEIGHT} {w / WIDTH} {h / HEIGHT}\n")
        self.label(split, number).write_text("".join(rows))

    def image(self, split: str, number: int) -> Path:
        return self.root / "images" / split / f"{number}.jpg"

    def label(self, split: str, number: int) -> Path:
        return self.root / "labels" / split / f"{number}.txt"

    def copy(self, split: str, number: int, to_split: str, to_number: int) -> None:
        """The same picture in another place, with boxes of its own."""
        self.add(to_split, to_number, picture(np.random.default_rng(9)))
        shutil.copy(self.image(split, number), self.image(to_split, to_number))

    def config(self, form: DataFormat) -> DataConfig:
        config = config_of(self.root, form, "", ".", ["cat", "dog"])
        if form == DataFormat.coco:
            for split, content in self.json.items():
                (self.root / f"{split}.json").write_text(json.dumps(content))
            parts = {split: SplitConfig(f"{split}.json", f"images/{split}") for split in IMAGES}
        else:
            parts = {split: SplitConfig(f"images/{split}", ".") for split in IMAGES}
        return replace(config, **parts, on_error=OnError.stop)
