"""The Python API: ``Detector``, a trained network, and the ``Prediction`` it returns; its files."""

import os
import re
import sys
import time
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
from numpy import ndarray

from conf import ConfigError, TrainError, compose, suggestions
from conf.cli import command_line, program
from conf.cli.run_files import refuse_existing
from conf.schema import DetectConfig, PredictConfig, require
from data import DataError, Exif, OnBadFile, cut_at_edges
from data.layouts import class_numbers
from data.media import Frame, FrameBatch, FrameBatches, InputFit, Medium, find_media, pixels_of, read_picture
from models import Postprocess, for_detection
from models.darknet import fuse_batch_norm
from train_utils import build, distributed, numerics, results
from train_utils.inference import detect, open_checkpoint
from train_utils.report import draw

FILE_OPTIONS = set("source out draw save_json save_txt".split())  # of predict.py; a Detector has none of them
GPU_BATCH_SIZE = 8  # on a CPU it is 1: threads process several batches at a time
# Attributes of Ultralytics' results and models: what to write here.
WORDS = {
    "boxes": ".boxes_xyxy, .scores and .classes",
    "conf": ".scores",
    "cls": ".classes",
    "names": ".all_class_names",
    "orig_img": ".image",
    "orig_shape": ".image.shape[:2]",
    "train": "train([...])",
    "val": "evaluate([...])",
    "export": "export([...])",
    "track": "see docs/use/python.md",
    "pandas": ".to_df()",
    "to_json": ".to_coco(image_id), and json",
    "save_txt": "predict.py save_txt=true",
    "to": "Detector(..., device=...)",
    "speed": "call the picture alone; predict.py prints the mean time of an image",
}
FORKS: list[int] = []  # processes that forks made, from the first to this one
os.register_at_fork(after_in_child=lambda: FORKS.append(os.getpid()))


class _Answers:
    """Says what to write for an attribute of another program."""

    def __getattr__(self, name: str) -> Any:
        fix = f". fix: {WORDS[name]}" if name in WORDS else ""
        raise AttributeError(f"a {type(self).__name__} has no attribute {name}{fix}", name=name, obj=self)


@dataclass(frozen=True, eq=False)
class Prediction(_Answers):
    """The n objects on a picture, best first, as arrays; iterating yields them one by one."""

    boxes_xyxy: ndarray  # float64 (n, 4) in pixels of the picture, clipped to it
    scores: ndarray  # float64 (n,) in 0..1
    classes: ndarray  # int (n,) from 0
    all_class_names: Sequence[str] = field(repr=False)  # of every class, in order
    all_category_ids: Sequence[int] = field(repr=False)  # of every class, in the data set
    frame: Frame = field(repr=False)

    @property
    def class_names(self) -> list[str]:
        """The class name of each object."""
        return [self.all_class_names[index] for index in self.classes.tolist()]

    @property
    def xyxy(self) -> ndarray:
        """``boxes_xyxy``, as other programs call it."""
        return self.boxes_xyxy

    @property
    def xywh(self) -> ndarray:
        """Centre x, centre y, width and height in pixels, float64 (n, 4)."""
        low, high = self.boxes_xyxy[:, :2], self.boxes_xyxy[:, 2:]
        return np.hstack([(low + high) / 2, high - low])

    @property
    def image(self) -> ndarray:
        """The picture as the detector saw it, turned upright: uint8 (h, w, 3) in BGR order."""
        return cv2.cvtColor(self.frame.image, cv2.COLOR_RGB2BGR)

    @property
    def path(self) -> Path | None:
        """The file of the picture or video; None for pixels, cameras and addresses."""
        medium = self.frame.medium
        return None if medium.image is not None or medium.address else medium.path

    def __getitem__(self, index: object) -> Any:
        fix = f"leave [{index}] out; a loop gives box, score, number and name of each object"
        raise TypeError(f"a picture has one Prediction, not a list of them. fix: {fix}")

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
        """The drawn picture, which notebooks display."""
        return cv2.imencode(".jpg", self.plot())[1].tobytes()

    def to_coco(self, image_id: int) -> list[dict[str, Any]]:
        """COCO results: image_id, category_id, bbox (left, top, width, height in pixels), score."""
        rows = results.make_detections(image_id, self.classes, self.scores, self.boxes_xyxy)
        return results.to_coco_json(rows, self.all_category_ids)

    def to_supervision(self) -> Any:
        """``supervision.Detections`` with ``class_name``; raises ConfigError if it is missing."""
        return require("supervision", "to_supervision()").Detections(
            xyxy=self.boxes_xyxy.astype(np.float32),
            confidence=self.scores.astype(np.float32),
            class_id=self.classes,
            data={"class_name": np.array(self.class_names, dtype=np.str_)},
        )

    def to_df(self) -> Any:
        """A pandas ``DataFrame`` with a row for each object; raises ConfigError without pandas."""
        frame = require("pandas", "to_df()").DataFrame
        table = frame(self.boxes_xyxy, columns="xmin ymin xmax ymax".split())
        return table.assign(confidence=self.scores, **{"class": self.classes}, name=self.class_names)

    def save_crops(self, folder: str | os.PathLike[str]) -> None:
        """Write ``<folder>/<class>/<picture>_[<frame>_]<number>.jpg`` of each, or TrainError."""
        frame = self.frame
        image = self.image
        stem = self.path.stem if self.path else f"picture{frame.medium.name}"
        stem += f"_{frame.number}" * (frame.frames_per_second > 0)
        for number, (box, _, _, name) in enumerate(self):
            left, top, right, bottom = map(int, box)
            path = Path(folder, re.sub(r"^\.|/", "_", name), f"{stem}_{number}.jpg")
            if path.exists():  # arrays have no names, and pictures of two folders may have one
                raise TrainError(f"{path} is there already", "another folder for this picture")
            draw.write_image(path, image[top : bottom + 1, left : right + 1], "or another folder")

    def plot(self) -> ndarray:
        """A copy of the picture with boxes, names and scores: uint8 (h, w, 3) in BGR."""
        drawn = draw.draw_boxes(self.frame.image, self.boxes_xyxy, self.classes, self.all_class_names, self.scores)
        return cv2.cvtColor(drawn, cv2.COLOR_RGB2BGR)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the drawn picture and return its path. Raises TrainError if that fails."""
        draw.write_image(Path(path), self.plot(), "end the name in .jpg or .png, or take another path")
        return Path(path)

    def show(self) -> None:
        """Show the drawn picture in a notebook or a viewer; raises TrainError without either."""
        ipython = sys.modules.get("IPython")  # imported in every notebook
        if ipython is not None and hasattr(ipython.get_ipython(), "kernel"):
            from IPython.display import display

            display(self)
        elif not PIL.ImageShow.show(PIL.Image.fromarray(self.plot()[..., ::-1])):
            raise TrainError("this system has no picture viewer", "save() the picture")


def format_counts(counts: Counter[str]) -> str:
    """The ten most frequent classes, and how many others: ``car 12, dog 1, 3 more classes``."""
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    more = f", {len(ordered) - 10} more classes" if len(ordered) > 10 else ""
    return ", ".join(f"{name} {count}" for name, count in ordered[:10]) + more


class Predictor:
    """A network with its preprocessing and NMS, as configured; threads may share it."""

    def __init__(self, config: PredictConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.network = open_checkpoint.open_detector(config.ckpt, config.model, config.names, config.image_size)
        numerics.autocast_dtype(config.precision, device, "precision")  # TrainError if it has none
        self.model = self.for_one = for_detection(self.network.model.to(device), device)
        rect = config.rect and self.model.takes_any_size
        self.fit = InputFit(self.network.image_size, self.network.model.max_stride, config.resize, rect)
        self.postprocess = self._suppression()
        # Load torchvision and the device's kernels now, not with the first picture.
        import torchvision  # noqa: F401 - NMS imports it lazily, but not for the few boxes of a blank image

        height, width = self.model.nearest_size(1, 1)
        blank = FrameBatch([], torch.zeros(1, 3, height, width, dtype=torch.uint8), [])
        every_box = replace(self.postprocess, confidence=0.0, classes=None)
        list(detect.detect_batches(self.model, [blank], every_box, device, precision=config.precision))

    def at(self, **limits: Any) -> Self:
        """The same with other options of NMS. Raises ConfigError, DataError for unknown classes."""
        other = copy(self)
        other.config = replace(self.config, **limits)
        compose.check_limits(other.config)
        other.postprocess = other._suppression()
        return other

    def _suppression(self) -> Postprocess:
        classes = None
        if self.config.classes is not None:
            classes = class_numbers(self.config.classes, self.network.names, "classes")
        return build.build_postprocess(self.config, self.model, classes)

    def frames(self, media: Sequence[Medium], on_error: OnBadFile) -> FrameBatches:
        """The frames of ``media`` in batches; of 1 on a CPU, else 8, if ``batch_size`` is null."""
        size = self.config.batch_size or (1 if self.device.type == "cpu" else GPU_BATCH_SIZE)
        exif, threads = self.config.exif, self.config.workers
        return FrameBatches(media, self.fit, size, exif=exif, on_error=on_error, threads=threads)

    def predict(self, batches: Iterable[FrameBatch], in_turn: bool = False, **hooks: Any) -> Iterator[Prediction]:
        """The objects on each frame, in order; ``in_turn`` and ``hooks`` go to detect_batches."""
        found = detect.detect_batches(
            self.for_one if in_turn else self.model,
            batches,
            self.postprocess,
            self.device,
            precision=self.config.precision,
            in_turn=in_turn,
            **hooks,
        )
        for batch, tables in found:
            for frame, letterbox, rows in zip(batch.frames, batch.letterboxes, tables, strict=True):
                table = rows.double().numpy()
                boxes = cut_at_edges(letterbox.to_original(table[:, :4]), frame.size)
                inside = (boxes[:, 2:] > boxes[:, :2]).all(1)  # others lie in the padding
                scores, classes = table[inside, 4], table[inside, 5].astype(int)
                names, ids = self.network.names, self.network.category_ids
                yield Prediction(boxes[inside], scores, classes, names, ids, frame)


@dataclass
class ResultWriter:
    """Writes the files of one prediction below ``out``, and counts what it found."""

    media: Sequence[Medium]
    predictor: Predictor
    out: Path

    def __post_init__(self) -> None:
        self.config = self.predictor.config
        names = [medium.name for medium in self.media]
        videos = [medium.name for medium in self.media if medium.is_video]
        kept = {name: name for name in names if name.lower().endswith(draw.PICTURE_SUFFIXES)}
        self.drawn_names = results.file_names(names, ".png") | kept | results.file_names(videos, ".mp4")
        self.label_names = results.file_names([name for name in names if name not in videos], ".txt")
        self.drawn = draw.DrawnFiles()
        self.results: list[results.ImageResult] = []
        self.num_images = 0
        self.counts = Counter[str]()  # detections of each class

    def add(self, prediction: Prediction) -> None:
        """Draw a frame, write its labels, count it."""
        frame, medium = prediction.frame, prediction.frame.medium
        rows = results.make_detections(0, prediction.classes, prediction.scores, prediction.boxes_xyxy)
        result = results.ImageResult(medium.name, frame.number if medium.is_video else None, frame.size, rows)
        if self.config.save_json:  # otherwise a camera may run for days without filling memory
            self.results.append(result)
        self.num_images += 1
        self.counts.update(prediction.class_names)
        if self.config.save_txt and not medium.is_video:
            results.write_yolo(self.out / "labels" / self.label_names[medium.name], result)
        path = self.out / self.drawn_names[medium.name]
        if self.config.draw and medium.is_video:
            self.drawn.frame(path, frame.frames_per_second, frame.seconds, prediction.plot)
        elif self.config.draw:
            self.drawn.picture(path, prediction.plot)

    def close(self) -> None:
        """Write the files that hold all results."""
        if self.config.save_json:
            network = self.predictor.network
            images, found = results.coco_files(self.results, network.names, network.category_ids)
            refuse_existing(self.out / "detections.json", "out")  # of another program that began meanwhile
            results.write_json(self.out / "images.json", images)
            results.write_json(self.out / "detections.json", found)


class Detector(_Answers):
    """A trained network: pictures and videos in, boxes out.

        detector = Detector("runs/quickstart/<date_time>", confidence=0.4)
        detector("street.jpg").save("out.jpg")

    ``ckpt`` and the keywords are the options of predict.py; for those with a dot write
    ``**{"model.weights": "coco"}``. Results equal those of predict.py, except for the last bits of
    a single picture on a CPU, which depend on the number of threads. Threads may share a detector.
    Raises the errors of predict.py. ``names`` are the class names in the order of their numbers.
    """

    def __init__(self, ckpt: str | os.PathLike[str] | None = None, **options: Any) -> None:
        if wrong := FILE_OPTIONS & options.keys():
            raise ConfigError(f"{', '.join(sorted(wrong))}: only predict.py reads this", "leave it out")
        options = options if ckpt is None else {"ckpt": ckpt, **options}
        overrides = [command_line.override(key, value) for key, value in options.items()]
        config = program.options_of("predict", [*overrides, "source=''"])
        self._predictor = network = Predictor(config, distributed.choose_device(config.device))
        # Without fusing, batch norm would take a tenth of the time of a single picture.
        network.for_one = fuse_batch_norm(network.model).to(memory_format=torch.channels_last)
        self.names = list(network.network.names)
        self._forks = len(FORKS)

    def __repr__(self) -> str:
        network = self._predictor.network
        return f"<Detector {network.note}; {network.image_size} pixels on {self._predictor.device.type}>"

    def __call__(self, source: Any, *, confidence: float | None = None, classes: Any = None, **others: Any) -> Any:
        """Detect on ``source``.

        A picture (path, URL, Pillow image, or array uint8 (h, w, 3) in BGR order, as OpenCV reads
        it) gives a Prediction, a list of pictures a list in the same order. Any other source of
        predict.py (video, camera number, stream, folder, glob pattern) gives a lazy iterator, with
        pictures as they finish.

        ``confidence`` (0..1) and ``classes`` (names or numbers) override the options for this call.
        Raises DataError for an unreadable source or an unknown class, ConfigError for a confidence
        out of range, TrainError in a process that was forked since the detector was made.
        """
        if self._forks != len(FORKS):  # it would wait for ever for torch's threads, which are not here
            raise TrainError("the detector was made before this process was forked", "make it after the fork")
        if others:
            given = [f"{key}={value}" for key, value in others.items()]
            fix = "confidence and classes are for a call, other options for Detector(...)"
            late = ConfigError(f"{', '.join(given)} comes late", fix)
            raise suggestions.refusal(given, DetectConfig) or late
        predictor = self._predictor
        if confidence is not None:
            predictor = predictor.at(confidence=float(confidence))
        if classes is not None:
            predictor = predictor.at(classes=classes)
        exif = predictor.config.exif
        if isinstance(source, list | tuple):
            media = [_picture(one, number, exif) for number, one in enumerate(source)]
            found = predictor.predict(predictor.frames(media, OnBadFile.stop))
            return sorted(found, key=lambda prediction: int(prediction.frame.medium.name))
        text = str(source) if isinstance(source, str | os.PathLike) or type(source) is int else ""
        one = Medium.at(text, text)
        if text and (one.is_video or not (one.address or os.path.isfile(text))):
            frames = predictor.frames(find_media(text), predictor.config.on_error)
            return _all_of(predictor, frames)
        frame = read_picture(_picture(source, 0, exif), exif)
        clock = [time.perf_counter()]

        def tick(*_: object) -> None:
            if predictor.device.type != "cpu":  # it computes while Python goes on
                torch.accelerator.synchronize()
            clock.append(time.perf_counter())

        batch = FrameBatch.of([predictor.fit.prepare(frame)])
        tick()
        prediction = next(predictor.predict([batch], in_turn=True, on_raw_maps=tick))
        tick()
        times = (1000 * np.diff(clock)).tolist()
        # No field: the fields of any Prediction have values, as dataclasses.asdict needs.
        vars(prediction)["speed"] = dict(zip("preprocess inference postprocess".split(), times, strict=True))
        return prediction

    predict = __call__  # as other programs call it


def _all_of(predictor: Predictor, frames: FrameBatches) -> Iterator[Prediction]:
    yield from predictor.predict(frames)
    frames.check_whole()


def _picture(source: Any, number: int, exif: Exif) -> Medium:
    """A picture named by its number in the call. Raises DataError for anything else."""
    if isinstance(source, PIL.Image.Image):
        source = pixels_of(source, exif)[:, :, ::-1]
    if isinstance(source, ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3 or source.size == 0:
            raise DataError(f"an array is {source.dtype} {source.shape}", "uint8 (height, width, 3) in BGR")
        return Medium(Path(), str(number), image=source[:, :, ::-1].copy())  # the caller may change its own
    if isinstance(source, str | os.PathLike):
        medium = Medium.at(str(source), str(number))
        if not medium.is_video:
            return medium
    told = f"{type(source).__name__} {getattr(source, 'shape', source)}"  # not all numbers of a tensor
    raise DataError(f"{told} is not a picture", "a path, URL, array, Pillow image, list; call videos alone")
