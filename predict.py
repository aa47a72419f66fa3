r"""Detect objects in pictures and videos of your own.

    python predict.py ckpt=runs/quickstart/... source=pictures
    python predict.py ckpt=runs/coco/... "source=pictures/**/*.jpg" out=found confidence=0.4
    python predict.py model=yolov4 model.weights=yolov4.weights names=coco.names \
        source=street.mp4 resize=stretch

The results are in runs/predict/<date_time>/: pictures with boxes, detections.json, images.json and
labels/*.txt.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.programs import run

    run("predict")
    raise SystemExit

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from conf.build.network import Detector, open_detector
from conf.failures import ConfigError
from conf.schema_inference import PredictConfig
from data import Frame, FrameBatch, FrameBatches, Medium, cut_at_edges, find_media
from models import Postprocess
from train_utils.distributed import World, init_distributed_mode
from train_utils.launch.environment import peek_world_size
from train_utils.loop.detect import detect_batches
from train_utils.pictures.boxes import DrawnFiles
from train_utils.run.log import Progress
from train_utils.run.run_folder import dated_folder, open_folder
from train_utils.scores.detections import make_detections
from train_utils.scores.result_files import ImageResult, coco_files, file_names, write_json, write_yolo

GPU_BATCH_SIZE = 8  # on a CPU it is 1, because threads process several batches at a time


class Found(NamedTuple):
    """The detections on one frame, best first."""

    boxes_xyxy: np.ndarray  # float64 (n, 4) in pixels of the frame, clipped to it
    classes: np.ndarray  # int (n,)
    scores: np.ndarray  # float64 (n,)


def predict(config: PredictConfig) -> Path:
    """Detect as configured and return the folder with the results.

    Raises ConfigError if it is one of several processes, and the errors of the parts for an empty
    source, weights that do not fit and unreadable files.
    """
    if peek_world_size() > 1:
        raise ConfigError(
            f"predict.py runs in one process, but {peek_world_size()} were started. fix: start it without a launcher; "
            "for several GPUs start it once per GPU, each with a part of the source"
        )
    world = init_distributed_mode(config.device.value, timeout_seconds=60)
    media = find_media(config.source)
    detector = open_detector(config.ckpt, config.model, config.names, config.image_size)
    frames = open_frames(config, media, detector, world)
    progress = Progress(frames.count(), "predict", world.is_main)
    out = Path(config.out) if config.out is not None else dated_folder("predict")
    writer = ResultWriter(config, media, detector, out)
    open_folder(world, out, "out")

    print(f"{detector.note}; {detector.image_size} pixels on {world.device.type}", flush=True)
    network = TimedNetwork(config, detector, world)
    started = time.perf_counter()
    with writer.drawn:
        for batch, detections in detect_batches(network, frames, list, world.device, "batch_size"):
            for frame, found in found_on_frames(batch, detections):
                writer.add(frame, found)
            progress.advance(len(batch.frames))
    progress.close()
    writer.close()
    print(summary(writer, frames, network, time.perf_counter() - started))
    return out


def open_frames(config: PredictConfig, media: list[Medium], detector: Detector, world: World) -> FrameBatches:
    """Open the batches of network input, the same as in an evaluation with the same options."""
    return FrameBatches(
        media,
        image_size=detector.image_size,
        stride=detector.model.max_stride,
        batch_size=config.batch_size or (1 if world.device.type == "cpu" else GPU_BATCH_SIZE),
        resize=config.resize,
        rect=config.rect,
        exif=config.exif,
        on_error=config.on_error,
        threads=config.workers,
    )


class TimedNetwork:
    """The network and its suppression, with the sum of its seconds over all calls and threads."""

    def __init__(self, config: PredictConfig, detector: Detector, world: World) -> None:
        self.model = detector.model.to(world.device)
        self.postprocess = Postprocess(
            self.model.heads,
            confidence=config.confidence,
            nms_iou=config.nms_iou,
            max_detections=config.max_detections,
            multi_label=config.multi_label,
        )
        self._calls: list[float] = []  # appending is thread-safe

    def __call__(self, images: Tensor) -> list[Tensor]:
        """Detections (n, 6) of each of the images (B, 3, H, W) in 0..1, best first, on the CPU.

        The columns are x1, y1, x2, y2 in pixels of the network's input, score and class.
        """
        started = time.perf_counter()
        detections = [rows.cpu() for rows in self.postprocess(self.model(images))]
        self._calls.append(time.perf_counter() - started)
        return detections

    @property
    def seconds(self) -> float:
        """Seconds of all calls together."""
        return sum(self._calls)


def found_on_frames(batch: FrameBatch, detections: list[Tensor]) -> Iterator[tuple[Frame, Found]]:
    """Detections on each frame of a batch, in its pixels, without boxes in the padding."""
    for frame, letterbox, rows in zip(batch.frames, batch.letterboxes, detections, strict=True):
        table = rows.double().numpy()
        boxes = cut_at_edges(letterbox.to_original(table[:, :4]), frame.size)
        inside = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
        yield frame, Found(boxes[inside], table[inside, 5].astype(int), table[inside, 4])


class ResultWriter:
    """The files of one prediction below ``out``."""

    def __init__(self, config: PredictConfig, media: list[Medium], detector: Detector, out: Path) -> None:
        """Open the writer. Raises ConfigError if a picture would overwrite its source."""
        self.config, self.detector, self.out = config, detector, out
        videos = file_names([medium.name for medium in media if medium.is_video], ".mp4")
        self.drawn_names = {medium.name: videos.get(medium.name, medium.name) for medium in media}
        self.label_names = file_names([medium.name for medium in media if not medium.is_video], ".txt")
        for medium in media:
            if config.draw and medium.path.resolve() == (out / self.drawn_names[medium.name]).resolve():
                raise ConfigError(f"out={out} would overwrite {medium.path}. fix: choose another out=, or draw=false")
        self.drawn = DrawnFiles(detector.names, config.workers)
        self.results: list[ImageResult] = []
        self.turned = 0  # pictures that EXIF tags turned

    def add(self, frame: Frame, found: Found) -> None:
        """Draw a frame and write its labels."""
        medium = frame.medium
        rows = make_detections(0, found.classes, found.scores, found.boxes_xyxy)
        result = ImageResult(medium.name, frame.number if medium.is_video else None, frame.size, rows)
        self.results.append(result)
        self.turned += frame.turned
        if self.config.save_txt and not medium.is_video:
            write_yolo(self.out / "labels" / self.label_names[medium.name], result)
        if self.config.draw:
            path = self.out / self.drawn_names[medium.name]
            if medium.is_video:
                self.drawn.frame(path, frame.frames_per_second, frame.image, *found)
            else:
                self.drawn.picture(path, frame.image, *found)

    def close(self) -> None:
        """Write the files that need all results."""
        if self.config.save_json:
            images, detections = coco_files(self.results, self.detector.names, self.detector.category_ids)
            write_json(self.out / "images.json", images)
            write_json(self.out / "detections.json", detections)


def summary(writer: ResultWriter, frames: FrameBatches, network: TimedNetwork, seconds: float) -> str:
    """The last line of output. Reading and network overlap, so their times may exceed the total."""
    count = len(writer.results)
    found = sum(len(result.detections) for result in writer.results)
    total, reading, inference = (1000 * part / max(1, count) for part in (seconds, frames.seconds, network.seconds))
    left_out = f", {len(frames.skipped)} files left out" if frames.skipped else ""
    turned = f", {writer.turned} turned upright by their EXIF tag" if writer.turned else ""
    return (
        f"{count} images, {found} detections{left_out}{turned}, in {writer.out}; ms per image: {total:.1f} in total;"
        f" in parallel threads {reading:.1f} reading, {inference:.1f} network and NMS"
    )
