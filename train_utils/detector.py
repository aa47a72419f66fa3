"""A trained network at work: ``Detector`` for callers in Python, and what it finds on a picture."""

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import cv2
import numpy as np
import PIL.Image
import PIL.ImageShow
import torch

from conf import ConfigError, compose, errors, run
from conf.schema import DetectConfig
from conf.train_options import EvalPrecision
from data import DataError, Exif, OnBadFile, cut_at_edges
from data.layouts import class_numbers
from data.media import Frame, FrameBatch, FrameBatches, InputFit, Medium, find_media, pixels_of, read_picture
from models import Postprocess, for_detection
from models.darknet import fuse_batch_norm
from train_utils import build, detect, distributed, draw, numerics, open_checkpoint, results

FILE_OPTIONS = {"source", "out", "draw", "save_json", "save_txt"}  # of predict.py, which mean nothing to a Detector
GPU_BATCH_SIZE = 8  # on a CPU it is 1, because threads process several batches at a time


@dataclass(frozen=True, eq=False)
class Prediction:
    """The n objects on a picture, best first: as arrays, or one by one in a loop."""

    boxes_xyxy: np.ndarray  # float64 (n, 4) in pixels of the picture, clipped to it
    scores: np.ndarray  # float64 (n,) in 0..1
    classes: np.ndarray  # int (n,) from 0
    all_class_names: Sequence[str] = field(repr=False)  # of every class, in order
    all_category_ids: Sequence[int] = field(repr=False)  # of every class, in the data set
    frame: Frame = field(repr=False)

    @property
    def class_names(self) -> list[str]:
        """The class name of each object."""
        return [self.all_class_names[index] for index in self.classes.tolist()]

    @property
    def image(self) -> np.ndarray:
        """The picture as the detector saw it, turned upright: uint8 (h, w, 3) in BGR order."""
        return cv2.cvtColor(self.frame.image, cv2.COLOR_RGB2BGR)

    @property
    def path(self) -> Path | None:
        """The file of the picture or video; None for pixels, cameras and addresses."""
        medium = self.frame.medium
        return None if medium.image is not None or medium.address else medium.path

    def __len__(self) -> int:
        return len(self.scores)

    def __iter__(self) -> Iterator[tuple[list[float], float, int, str]]:
        """Box (left, top, right, bottom in pixels), score, class and name of each object."""
        columns = self.boxes_xyxy.tolist(), self.scores.tolist(), self.classes.tolist(), self.class_names
        return zip(*columns, strict=True)

    def __repr__(self) -> str:
        height, width = self.frame.size
        return f"<Prediction: {format_counts(Counter(self.class_names)) or 'nothing'} on {width}x{height} pixels>"

    def _repr_jpeg_(self) -> bytes:
        """What a notebook shows."""
        return cv2.imencode(".jpg", self.plot())[1].tobytes()

    def to_coco(self, image_id: int) -> list[dict[str, Any]]:
        """The objects as COCO results, with image_id, category_id, bbox and score.

        A bbox is left, top, width and height in pixels.
        """
        rows = results.make_detections(image_id, self.classes, self.scores, self.boxes_xyxy)
        return results.to_coco_json(rows, self.all_category_ids)

    def to_supervision(self) -> Any:
        """The objects as ``supervision.Detections``, with ``data["class_name"]``.

        Raises ConfigError without the package supervision.
        """
        try:
            import supervision
        except ImportError as error:
            fix = errors.install_command("supervision")
            raise ConfigError(f"to_supervision() needs supervision, not installed here. fix: {fix}") from error
        return supervision.Detections(
            xyxy=self.boxes_xyxy.astype(np.float32),
            confidence=self.scores.astype(np.float32),
            class_id=self.classes,
            data={"class_name": np.array(self.class_names, dtype=np.str_)},
        )

    def plot(self) -> np.ndarray:
        """A copy of the picture with boxes, names and scores, uint8 (h, w, 3) in BGR."""
        drawn = draw.draw_boxes(self.frame.image, self.boxes_xyxy, self.classes, self.all_class_names, self.scores)
        return cv2.cvtColor(drawn, cv2.COLOR_RGB2BGR)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the drawn picture and return its path. Raises TrainError if that fails."""
        draw.write_image(Path(path), self.plot(), "or another path")
        return Path(path)

    def show(self) -> None:
        """Show the drawn picture: below the cell of a notebook, else in the system's viewer.

        Raises TrainError if there is no viewer.
        """
        ipython = sys.modules.get("IPython")  # imported in every notebook
        if ipython is not None and hasattr(ipython.get_ipython(), "kernel"):
            from IPython.display import display

            display(self)
        elif not PIL.ImageShow.show(PIL.Image.fromarray(self.plot()[..., ::-1])):
            raise errors.TrainError("no program to show pictures is found here. fix: save() the picture")


def format_counts(counts: Counter[str], most: int = 10) -> str:
    """Classes by falling count: ``car 12, dog 1``; beyond ``most`` only how many more there are."""
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    more = f", {len(ordered) - most} classes more" if len(ordered) > most else ""
    return ", ".join(f"{name} {count}" for name, count in ordered[:most]) + more


class Predictor:
    """A network and its suppression, as configured; threads may share it."""

    def __init__(self, config: DetectConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.network = open_checkpoint.open_detector(config.ckpt, config.model, config.names, config.image_size)
        self.dtype = numerics.evaluation_dtype(config.precision, device, "precision")
        self.model = self.for_one = for_detection(self.network.model.to(device), device)
        self.fit = InputFit(self.network.image_size, self.network.model.max_stride, config.resize, config.rect)
        self.postprocess = self._suppression()
        # torchvision and the device's kernels load here, not with the first picture.
        import torchvision  # noqa: F401 - a blank image has too few boxes to need it

        blank = FrameBatch([], torch.zeros(1, 3, *[self.network.model.max_stride] * 2, dtype=torch.uint8), [])
        every_box = replace(self.postprocess, confidence=0.0, classes=None)
        list(detect.detect_batches(self.model, [blank], every_box, device, dtype=self.dtype))

    def at(self, **limits: Any) -> Self:
        """The same network with other options of its suppression, such as ``confidence``.

        Raises ConfigError for a number that is out of range, DataError for a class that is none.
        """
        other = copy(self)
        other.config = replace(self.config, **limits)
        compose.check_limits(other.config)
        other.postprocess = other._suppression()
        return other

    def _suppression(self) -> Postprocess:
        names, chosen = self.network.names, self.config.classes
        classes = class_numbers(chosen, names, "classes") if chosen is not None else None
        return build.build_postprocess(self.config, self.model.heads, classes)

    def frames(self, media: Sequence[Medium], on_error: OnBadFile, batch_size: int | None = None) -> FrameBatches:
        """The frames of ``media`` in batches; ``batch_size`` None: as suits the device."""
        size = batch_size or (1 if self.device.type == "cpu" else GPU_BATCH_SIZE)
        exif, threads = self.config.exif, self.config.workers
        return FrameBatches(media, self.fit, size, exif=exif, on_error=on_error, threads=threads)

    def predict(self, batches: Iterable[FrameBatch], in_turn: bool = False) -> Iterator[Prediction]:
        """The objects on each frame of the batches, in order, without boxes in the padding.

        ``in_turn`` is that of detect_batches.
        """
        names, category_ids = self.network.names, self.network.category_ids
        model, tf32 = self.for_one if in_turn else self.model, self.config.precision is EvalPrecision.tf32
        found = detect.detect_batches(
            model, batches, self.postprocess, self.device, dtype=self.dtype, tf32=tf32, in_turn=in_turn
        )
        for batch, tables in found:
            for frame, letterbox, rows in zip(batch.frames, batch.letterboxes, tables, strict=True):
                table = rows.double().numpy()
                boxes = cut_at_edges(letterbox.to_original(table[:, :4]), frame.size)
                inside = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
                boxes, scores, classes = boxes[inside], table[inside, 4], table[inside, 5].astype(int)
                yield Prediction(boxes, scores, classes, names, category_ids, frame)


class Detector(Predictor):
    """A trained network: pictures and videos in, boxes out.

        detector = Detector("runs/quickstart/<date_time>", confidence=0.4)
        detector("street.jpg").save("out.jpg")

    ``ckpt`` and the keywords are the options of predict.py, under the same names; for those with a
    dot write ``**{"model.weights": "coco"}``. A detector finds what predict.py finds, but on a CPU
    the last bits for a picture by itself are others, and depend on the number of threads. Several
    threads may share a detector. Raises ConfigError, CheckpointError and the other errors of
    predict.py, with the same messages. ``names`` are the class names, in their numbers' order.
    """

    def __init__(self, ckpt: str | os.PathLike[str] | None = None, **options: Any) -> None:
        if wrong := FILE_OPTIONS & options.keys():
            raise ConfigError(f"{', '.join(sorted(wrong))} is for the files of predict.py. fix: leave it out")
        options = options if ckpt is None else {"ckpt": ckpt, **options}
        overrides = [run.override(key, value) for key, value in options.items()]
        config = run.options_of("predict", [*overrides, "source=''"])
        super().__init__(config, distributed.choose_device(config.device.value))
        # Batch norm of its own would take a tenth of the time of a single picture.
        self.for_one = fuse_batch_norm(self.model).to(memory_format=torch.channels_last)
        self.batch_size, self.on_error = config.batch_size, config.on_error
        self.names = list(self.network.names)

    def __repr__(self) -> str:
        return f"<Detector {self.network.note}; {self.network.image_size} pixels on {self.device.type}>"

    def __call__(self, source: Any, *, confidence: float | None = None, classes: Any = None) -> Any:
        """Detect on ``source``.

        For a picture (a path, an address, a Pillow image or an array) this returns a Prediction. An
        array is uint8 (h, w, 3) in BGR order, as OpenCV reads it. For a list of pictures it returns
        a list in the same order. For any other source of predict.py (a video, a camera by its
        number, a stream, a folder or a glob pattern) it returns a lazy iterator, which yields
        pictures in the order in which they are finished.

        ``confidence`` (0..1) and ``classes`` (names or numbers) hold for this call alone; None: as
        the detector was made. Raises DataError if the source cannot be read or is none of these, or
        a class is none of the network's, and ConfigError for a confidence out of range.
        """
        own = {} if confidence is None else {"confidence": float(confidence)}
        own |= {} if classes is None else {"classes": classes}
        if own:
            return self.at(**own)(source)
        if isinstance(source, list | tuple):
            media = [_picture(one, number, self.config.exif) for number, one in enumerate(source)]
            found = self.predict(self.frames(media, OnBadFile.stop, self.batch_size))
            return sorted(found, key=lambda prediction: int(prediction.frame.medium.name))
        text = str(source) if isinstance(source, str | os.PathLike) or type(source) is int else ""
        one = Medium.at(text, text)
        if text and (one.is_video or not (one.address or os.path.isfile(text))):
            return self._all_of(self.frames(find_media(text), self.on_error, self.batch_size))
        frame = read_picture(_picture(source, 0, self.config.exif), self.config.exif)
        return next(self.predict([FrameBatch.of([self.fit.prepare(frame)])], in_turn=True))

    def _all_of(self, frames: FrameBatches) -> Iterator[Prediction]:
        yield from self.predict(frames)
        frames.check_whole()


def _picture(source: Any, number: int, exif: Exif) -> Medium:
    """One picture of a call, named by its number. Raises DataError if it is no picture."""
    if isinstance(source, PIL.Image.Image):
        source = pixels_of(source, exif)[:, :, ::-1]
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3 or not source.size:
            raise DataError(f"an array is {source.dtype} {source.shape}. fix: uint8 (height, width, 3) in BGR")
        return Medium(Path(), str(number), image=np.asarray(cv2.cvtColor(source, cv2.COLOR_BGR2RGB), dtype=np.uint8))
    medium = Medium.at(str(source), str(number)) if isinstance(source, str | os.PathLike) else None
    if medium is None or medium.is_video:
        raise DataError(f"{source!r} is no picture. fix: a path, address, array, Pillow image, list; call videos alone")
    return medium
