"""``Detector``: a trained network to call from Python."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from conf.api.prediction import Prediction
from conf.build.network import open_detector
from conf.build.predictor import Predictor
from conf.failures import ConfigError, plain_errors
from conf.programs import options_of, override
from conf.schema import PredictConfig
from data import DataError, Medium, OnBadFile, find_media
from train_utils.distributed import choose_device

OF_FILES = {"source", "out", "draw", "save_json", "save_txt"}  # options of predict.py that stand for nothing here


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
        for key in sorted(OF_FILES & options.keys()):
            raise ConfigError(f"{key} is for predict.py, which reads and writes files. fix: leave it out")
        given = options if ckpt is None else {"ckpt": ckpt, **options}
        self._given, self._overrides = given, [override(key, value) for key, value in given.items()]
        with self._plain_errors():
            config = options_of("predict", [*self._overrides, "source=''"])
            self.network = open_detector(config.ckpt, config.model, config.names, config.image_size)
            self.predictor = Predictor(config, self.network, choose_device(config.device.value))
        self.names = list(self.network.names)

    def __reduce__(self) -> tuple[Any, ...]:  # a copy, in this process or another, opens the same files
        return partial(Detector, **self._given), ()

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
        return self._found(media)

    def _in_order(self, sources: Sequence[Any]) -> list[Prediction]:
        with self._plain_errors():
            media = [self._picture(source, number) for number, source in enumerate(sources)]
        return sorted(self._found(media, OnBadFile.stop), key=lambda prediction: int(prediction.frame.medium.name))

    def _found(self, media: list[Medium], on_error: OnBadFile | None = None) -> Iterator[Prediction]:
        of_all = self.network.names, self.network.category_ids
        with self._plain_errors():
            for frame, (boxes_xyxy, classes, scores) in self.predictor.found(self.predictor.frames(media, on_error)):
                yield Prediction(boxes_xyxy, scores, classes, *of_all, frame)

    def _plain_errors(self, *source: str) -> AbstractContextManager[None]:
        return plain_errors(PredictConfig, [*self._overrides, *(override("source", one) for one in source)])

    def _picture(self, source: Any, number: int) -> Medium:
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
