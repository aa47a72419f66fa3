"""A small YOLO set, laid out as a test wants it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from data import Annotations, DataConfig, DataFormat, SplitConfig, open_annotations
from tests.data.bad_inputs import config_of

SIZES = {"a": (40, 60), "b": (30, 50), "c": (64, 32)}  # height, width


class YoloSet:
    """Three pictures, each with one box of its own class, wherever a test wants them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()

    def add(self, images: str, labels: str, stems: str = "abc") -> None:
        for folder in (images, labels):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        for stem in stems:
            height, width = SIZES[stem]
            assert cv2.imwrite(str(self.root / images / f"{stem}.jpg"), np.full((height, width, 3), 128, np.uint8))
            (self.root / labels / f"{stem}.txt").write_text(f"{'abc'.index(stem)} 0.5 0.5 0.25 0.5\n")

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def config(self, annotations: Any, images: Any = ".", names: list[str] | None = None) -> DataConfig:
        config = config_of(self.root, DataFormat.yolo, "", ".", names)
        part = SplitConfig(annotations, images)
        return replace(config, train=part, val=part)

    def open(
        self, annotations: Any, images: Any = ".", names: Any = ("x", "y", "z"), split: str = "train"
    ) -> Annotations:
        return open_annotations(self.config(annotations, images, list(names) if names else None), split)


def assert_whole(annotations: Annotations, stems: str = "abc") -> None:
    """The pictures of these stems in this order, each with its size, class and box."""
    assert [Path(annotations.file_name(index)).stem for index in range(len(annotations))] == list(stems)
    assert annotations.image_ids.tolist() == list(range(1, len(stems) + 1))
    for index, stem in enumerate(stems):
        height, width = SIZES[stem]
        assert Path(annotations.path(index)).is_file() and annotations.sizes[index].tolist() == [height, width]
        classes, boxes = annotations.training_boxes(index)
        assert classes.tolist() == ["abc".index(stem)]
        assert boxes.tolist() == [[0.375 * width, 0.25 * height, 0.625 * width, 0.75 * height]]
