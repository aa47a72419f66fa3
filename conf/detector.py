"""A trained network at work: ``Detector`` for callers in Python, and what it finds on a picture."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch

from conf.failures import ConfigError, plain_errors
from conf.network import TrainedNetwork, build_postprocess, open_detector
from conf.programs import options_of, override
from conf.schema import DetectConfig, PredictConfig
from data import DataError, Frame, FrameBatch, FrameBatches, InputFit, Medium, OnBadFile, cut_at_edges, find_media
from models import for_detection
from train_utils.config import EvalPrecision
from train_utils.detect import detect_batches
from train_utils.detections import make_detections, to_coco_json
from train_utils.distributed import choose_device
from train_utils.draw import WRITTEN, draw_boxes, write_image
from train_utils.numerics import autocast_dtype

FILE_OPTIONS = {"source", "out", "draw", "save_json", "save_txt"}  # of predict.py, which mean nothing to a Detector
GPU_BATCH_SIZE = 8  # on a CPU it is 1, because threads process several batches at a time


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
        return f"<Prediction: {format_counts(Counter(self.names)) or 'nothing'} on {width}x{height} pixels>"

    def _repr_jpeg_(self) -> bytes:
        """What a notebook shows."""
        return cv2.imencode(".jpg", self.draw())[1].tobytes()

    def select(self, rows: np.ndarray) -> Prediction:
        """Some of the objects, by a mask, bool (n,)."""
        columns = {name: getattr(self, name)[rows] for name in ("boxes_xyxy", "scores", "classes")}
        return replace(self, **columns)

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


def format_counts(counts: Counter[str], most: int = 10) -> str:
    """Classes by falling count: ``car 12, dog 1``; beyond ``most`` only how many more there are."""
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    more = f", {len(ordered) - most} classes more" if len(ordered) > most else ""
    return ", ".join(f"{name} {count}" for name, count in ordered[:most]) + more


class Predictor:
    """A network and its suppression, as configured; threads may share it."""

    def __init__(self, config: DetectConfig, network: TrainedNetwork, device: torch.device) -> None:
        self.config, self.network, self.device = config, network, device
        self.dtype = autocast_dtype(config.precision.value, device, "precision")
        self.model = for_detection(network.model.to(device), device)
        self.fit = InputFit(network.image_size, network.model.max_stride, config.resize, config.rect)
        self.postprocess = build_postprocess(config, self.model.heads)

    def at(self, confidence: float, nms_iou: float) -> Predictor:
        """The same network with other limits of its suppression."""
        other = copy(self)
        limits = replace(self.config, confidence=confidence, nms_iou=nms_iou)
        other.postprocess = build_postprocess(limits, self.model.heads)
        return other

    def frames(self, media: list[Medium], on_error: OnBadFile | None = None) -> FrameBatches:
        """The frames of ``media`` in batches; ``on_error`` stands in for the option."""
        config = self.config
        assert isinstance(config, PredictConfig)
        size = config.batch_size or (1 if self.device.type == "cpu" else GPU_BATCH_SIZE)
        return FrameBatches(media, self.fit, size, config.exif, on_error or config.on_error, config.workers)

    def predict(self, batches: Iterable[FrameBatch]) -> Iterator[Prediction]:
        """The objects on each frame of the batches, in order, without boxes in the padding."""
        names, category_ids = self.network.names, self.network.category_ids
        tf32 = self.config.precision is EvalPrecision.tf32
        for batch, detections in detect_batches(self.model, batches, self.postprocess, self.device, self.dtype, tf32):
            for frame, letterbox, rows in zip(batch.frames, batch.letterboxes, detections, strict=True):
                table = rows.double().numpy()
                boxes = cut_at_edges(letterbox.to_original(table[:, :4]), frame.size)
                of_all = Prediction(boxes, table[:, 4], table[:, 5].astype(int), names, category_ids, frame)
                yield of_all.select(np.asarray((boxes[:, 2:] > boxes[:, :2]).all(axis=1)))


class Detector:
    """A trained network: pictures and videos in, boxes out.

        detector = Detector("runs/quickstart/<date_time>", confidence=0.4)
        detector("street.jpg").save("out.jpg")

    ``ckpt`` and the keywords are the options of predict.py, under the same names; for those with a
    dot write ``**{"model.weights": "coco"}``. A detector finds what predict.py finds. Several
    threads may share one. Raises ConfigError, CheckpointError and the other errors of predict.py,
    with the same messages. ``names`` are the class names, in the order of their numbers.
    """

    def __init__(self, ckpt: str | PathLike[str] | None = None, **options: Any) -> None:
        for key in sorted(FILE_OPTIONS & options.keys()):
            raise ConfigError(f"{key} is for predict.py, which reads and writes files. fix: leave it out")
        self._options = options if ckpt is None else {"ckpt": ckpt, **options}
        self._overrides = [override(key, value) for key, value in self._options.items()]
        with self._plain_errors():
            config = options_of("predict", [*self._overrides, "source=''"])
            self.network = open_detector(config.ckpt, config.model, config.names, config.image_size)
            self.predictor = Predictor(config, self.network, choose_device(config.device.value))
        self.names = list(self.network.names)

    def __reduce__(self) -> tuple[Any, ...]:  # a copy, in this process or another, opens the same files
        return partial(Detector, **self._options), ()

    def __repr__(self) -> str:
        return f"<Detector {self.network.note}; {self.network.image_size} pixels on {self.predictor.device.type}>"

    def __call__(self, source: Any) -> Any:
        """Detect on ``source``.

        For a picture (a path or an array) this returns a Prediction. An array is uint8 (h, w, 3) in
        BGR order, as OpenCV reads it and other detectors take it. For a list of pictures it returns
        a list in the same order. For any other source of predict.py (a video, a camera by its
        number, a stream, a folder, a glob pattern or a .txt list) it returns a lazy iterator, which
        yields pictures in the order in which they are finished.

        Raises DataError if the source cannot be read or is none of these.
        """
        if isinstance(source, list | tuple):
            return self._in_order(source)
        if isinstance(source, np.ndarray):
            return self._in_order([source])[0]
        text = str(source) if type(source) is int else _path(source)
        with self._plain_errors(text):
            media = find_media(text)
            if media[0].path == Path(os.path.abspath(text)) and not media[0].is_video:
                return self._in_order([text])[0]
        return self._predict(media)

    def _in_order(self, sources: Sequence[Any]) -> list[Prediction]:
        with self._plain_errors():
            media = [_picture(source, number) for number, source in enumerate(sources)]
        return sorted(self._predict(media, OnBadFile.stop), key=lambda prediction: int(prediction.frame.medium.name))

    def _predict(self, media: list[Medium], on_error: OnBadFile | None = None) -> Iterator[Prediction]:
        with self._plain_errors():
            yield from self.predictor.predict(self.predictor.frames(media, on_error))

    def _plain_errors(self, *source: str) -> AbstractContextManager[None]:
        return plain_errors(PredictConfig, [*self._overrides, *(override("source", one) for one in source)])


def _picture(source: Any, number: int) -> Medium:
    """One picture of a call, named by its number. Raises DataError if it is no picture."""
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3 or not source.size:
            raise DataError(f"an array is {source.dtype} {source.shape}. fix: uint8 (height, width, 3) in BGR")
        return Medium(Path(), str(number), image=np.array(source[:, :, ::-1], order="C"))
    path = Path(_path(source)).absolute()
    medium = Medium(path, str(number))
    if not path.is_file() or medium.is_video:
        raise DataError(f"{source} is not the file of a picture. fix: a list holds pictures; call videos alone")
    return medium


def _path(source: Any) -> str:
    if isinstance(source, str | PathLike):
        return os.fspath(source)
    raise DataError(f"{type(source).__name__} is no picture. fix: a path, an array or a list")
