"""What a detector found on one picture or frame, for callers in Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from conf.build.results import counted
from conf.failures import ConfigError
from data import Frame
from train_utils.detections import make_detections, to_coco_json
from train_utils.draw import WRITTEN, draw_boxes, write_image


class Detection(NamedTuple):
    """One object."""

    box_xyxy: tuple[float, ...]  # left, top, right, bottom in pixels of the picture
    score: float  # 0..1
    class_index: int  # from 0
    name: str


@dataclass(frozen=True, eq=False)
class Prediction:
    """The n objects on a picture, best first: as arrays, or one by one in a loop."""

    boxes_xyxy: np.ndarray  # float64 (n, 4) in pixels of the picture, clipped to it
    scores: np.ndarray  # float64 (n,) in 0..1
    classes: np.ndarray  # int (n,) from 0
    class_names: Sequence[str] = field(repr=False)  # of all classes
    category_ids: Sequence[int] = field(repr=False)  # of all classes, in the data set
    frame: Frame = field(repr=False)

    @property
    def names(self) -> list[str]:
        """The class name of each object."""
        return [self.class_names[index] for index in self.classes.tolist()]

    @property
    def image(self) -> np.ndarray:
        """The picture as the detector saw it, turned upright: uint8 (h, w, 3) in BGR order."""
        return cv2.cvtColor(self.frame.image, cv2.COLOR_RGB2BGR)

    @property
    def path(self) -> Path | None:
        """The file of the picture or video; None for pixels and streams."""
        medium = self.frame.medium
        return None if medium.image is not None or medium.address else medium.path

    @property
    def number(self) -> int:
        """Which frame of its video this is, from 1; a picture has 1."""
        return self.frame.number

    def __len__(self) -> int:
        return len(self.scores)

    def __iter__(self) -> Iterator[Detection]:
        columns = self.boxes_xyxy.tolist(), self.scores.tolist(), self.classes.tolist(), self.names
        for box, score, index, name in zip(*columns, strict=True):
            yield Detection(tuple(box), score, index, name)

    def __repr__(self) -> str:
        height, width = self.frame.size
        return f"<Prediction: {counted(Counter(self.names)) or 'nothing'} on {width}x{height} pixels>"

    def _repr_jpeg_(self) -> bytes:
        """What a notebook shows."""
        return cv2.imencode(".jpg", self.draw())[1].tobytes()

    def to_coco(self, image_id: int) -> list[dict[str, Any]]:
        """The objects as COCO results, with image_id, category_id, bbox and score.

        A bbox is left, top, width and height in pixels.
        """
        return to_coco_json(make_detections(image_id, self.classes, self.scores, self.boxes_xyxy), self.category_ids)

    def to_supervision(self) -> Any:
        """The objects as ``supervision.Detections``, with ``data["class_name"]``.

        Raises ConfigError if supervision is not installed.
        """
        try:
            import supervision
        except ImportError as error:
            raise ConfigError(
                "to_supervision needs supervision, which is not installed. fix: uv sync --extra supervision"
            ) from error
        return supervision.Detections(
            xyxy=self.boxes_xyxy.astype(np.float32),
            confidence=self.scores.astype(np.float32),
            class_id=self.classes,
            data={"class_name": np.array(self.names, dtype=np.str_)},
        )

    def draw(self) -> np.ndarray:
        """A copy of the picture with boxes, names and scores, uint8 (h, w, 3) in BGR."""
        drawn = draw_boxes(self.frame.image, self.boxes_xyxy, self.classes, self.class_names, self.scores)
        return cv2.cvtColor(drawn, cv2.COLOR_RGB2BGR)

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the drawn picture and return its path.

        Raises ConfigError if the suffix is not that of a picture, TrainError if writing fails.
        """
        path = Path(path)
        if path.suffix.lower() not in WRITTEN:
            raise ConfigError(f"{path} is not the name of a picture. fix: one of {' '.join(WRITTEN)}")
        write_image(path, self.draw(), "or another path")
        return path
