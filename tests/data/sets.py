"""Broken and unusual inputs: how to write each, and the expected result.

Every set holds a good image ``a`` with one box and, beside it, the image, label or entry that the
case is about.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from conf.compose import compose
from conf.schema import TrainConfig
from data import Annotations, DataConfig, DataFormat, OnError, SplitConfig, open_annotations

HEIGHT, WIDTH = 40, 60
NAMES = ["cat", "dog"]
GOOD_ROW = "0 0.5 0.5 0.5 0.5\n"
GOOD_BOX = [15.0, 10.0, 30.0, 20.0]
GOOD_BOXES = [[0.0, *GOOD_BOX]]
SIZES = {"a": (40, 60), "b": (30, 50), "c": (64, 32)}  # height, width


def a_few_of(cases: Iterable[Any], every: int = 4) -> list[Any]:
    """The cases as parameters; those between each fourth one are for a release."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=[pytest.mark.release] * (n % every > 0)) for n, row in enumerate(rows)]


@dataclass(frozen=True)
class Case:
    """A case: how to make the set, and its ``error`` or else its pixels and boxes.

    ``left``: images and boxes that ``on_error=skip`` leaves; ``None``: the same error.
    """

    write: Callable[[Path], DataConfig]
    error: str | None = None  # a pattern
    left: tuple[int, int] | None = None
    pixels: np.ndarray | None = None  # of the image b
    boxes: list[list[float]] | None = None  # of the image b: class, left, top, width, height


def picture() -> np.ndarray:
    noise = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    return cv2.GaussianBlur(noise, (0, 0), 3)


PICTURE = picture()
COCO: DataConfig = compose("train", TrainConfig, ["data=coco"]).data


def config_of(
    root: Path, data_format: DataFormat, annotations: str, images: str, names: list[str] | None
) -> DataConfig:
    part = SplitConfig(annotations, images)
    places = {"root": str(root), "index_dir": str(root.parent / "index"), "train": part, "val": part}
    return replace(COCO, name="bad", format=data_format, names=names, on_error=OnError.stop, workers=0, **places)


def coco_content(second: str = "b.png") -> dict[str, Any]:
    return {
        "images": [
            {"id": number, "file_name": name, "height": HEIGHT, "width": WIDTH}
            for number, name in ((1, "a.png"), (2, second))
        ],
        "annotations": [
            {"id": 10 + number, "image_id": number, "category_id": 1, "bbox": GOOD_BOX, "area": 600, "iscrowd": 0}
            for number in (1, 2)
        ],
        "categories": [{"id": number, "name": name} for number, name in enumerate(NAMES, start=1)],
    }


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
    assert annotations.image_ids.tolist() == [sorted(stems).index(stem) + 1 for stem in stems]
    for index, stem in enumerate(stems):
        height, width = SIZES[stem]
        assert Path(annotations.path(index)).is_file() and annotations.sizes[index].tolist() == [height, width]
        classes, boxes = annotations.training_boxes(index)
        assert classes.tolist() == ["abc".index(stem)]
        assert boxes.tolist() == [[0.375 * width, 0.25 * height, 0.625 * width, 0.75 * height]]
