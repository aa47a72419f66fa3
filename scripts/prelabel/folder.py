"""From pictures to the folder of labels: detect, order, write."""

import csv
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from conf.build.network import open_detector
from conf.build.predictor import Found, Predictor, located
from conf.build.results import new_folder
from conf.failures import ConfigError
from conf.schema_inference import PrelabelConfig
from data import DataError, Frame, FrameBatches, Medium, find_media
from models import Darknet
from scripts.prelabel.formats import write_coco, write_label_studio, write_yolo_set
from scripts.prelabel.order import LOWEST, labelling_order, uncertainty
from train_utils.launch.devices import device_alone
from train_utils.loop.detect import detect_batches
from train_utils.scores.detections import make_detections
from train_utils.scores.result_files import ImageResult, file_names
from train_utils.terminal.progress import Progress


def prelabel(config: PrelabelConfig) -> Path:
    """Detect on all pictures, write the folder whole or not at all, and return its path.

    Raises ConfigError if the folder exists, for videos and for ONNX files, and the errors of
    unreadable pictures and weights.
    """
    with new_folder(config.out) as folder:
        print(_written(config, folder))
    return Path(config.out)


def _written(config: PrelabelConfig, folder: Path) -> str:
    """Write all files into ``folder``, and return what they are."""
    media = pictures(config)
    detector = open_detector(config.ckpt, config.model, config.names, config.image_size)
    if not isinstance(detector.model, Darknet):
        raise ConfigError(f"ckpt={config.ckpt} shows no features, which the order needs. fix: ckpt=<run folder>")
    below = replace(config, confidence=min(config.confidence, LOWEST))
    predictor = Predictor(below, detector, device_alone(config.device.value))
    frames, seen = predictor.frames(media), list[tuple[str, tuple[int, int], Found, np.ndarray]]()
    with Progress(len(media), "prelabel", enabled=True) as progress:
        for frame, found, features in found_with_features(predictor, frames):
            seen.append((frame.medium.name, frame.size, found, features))
            progress.at(len(seen))
    if not seen:
        raise DataError(f"source={config.source}: no picture could be read. fix: see the warnings above")
    names, sizes, founds, rows = zip(*sorted(seen, key=lambda one: one[0]), strict=True)
    values = [uncertainty(found.scores) for found in founds]
    results, table = [], [("rank", "file", "uncertainty", "distance")]
    for number, distance in labelling_order(np.array(values), np.stack(rows)):
        boxes_xyxy, classes, scores = founds[number]
        kept = scores > config.confidence
        detections = make_detections(0, classes[kept], scores[kept], boxes_xyxy[kept])
        results.append(ImageResult(names[number], None, sizes[number], detections))
        table.append((str(len(results)), names[number], f"{values[number]:.4f}", f"{distance:.4f}"))
    if config.format == "coco":
        write_coco(folder, results, detector)
    elif config.format == "yolo":
        write_yolo_set(folder, results, detector)
    else:
        root = media[0].path.parents[media[0].name.count("/")]
        certainty = {name: 1 - value for name, value in zip(names, values, strict=True)}
        write_label_studio(folder, results, detector, root.name, certainty)
    with (folder / "order.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(table)
    left_out = f", {len(frames.skipped)} files left out" if frames.skipped else ""
    what = f"{len(results)} pictures, {sum(len(result.detections) for result in results)} boxes{left_out}"
    return f"{detector.note}\n{what}, in {config.out}; label {results[0].name} first"


def pictures(config: PrelabelConfig) -> list[Medium]:
    """The pictures of the source. Raises ConfigError for videos, or if two share a label file."""
    media = find_media(config.source)
    labels = file_names([medium.name for medium in media], ".txt")
    for medium in media:
        if medium.is_video:
            raise ConfigError(f"{medium.path} is a video, labels are for pictures. fix: save its frames as pictures")
        if config.format == "yolo" and labels[medium.name] == f"{medium.name}.txt":
            raise ConfigError(f"{medium.name} and another picture need one .txt. fix: format=coco, or rename it")
    return media


def found_with_features(predictor: Predictor, batches: FrameBatches) -> Iterator[tuple[Frame, Found, np.ndarray]]:
    """Each frame with its detections and its features, float32 (C,) of unit length.

    They are the input of the deepest head's convolution, averaged over positions.
    """
    assert isinstance(predictor.model, Darknet)
    convolution = predictor.model.head_convolution(max(predictor.model.heads, key=lambda head: head.stride))
    of_thread = threading.local()  # threads share the network

    def forward(images: Tensor) -> list[Tensor]:
        return [*predictor(images), of_thread.map.float().mean(dim=(2, 3)).cpu()]

    tf32 = predictor.config.precision == "tf32"
    computed = detect_batches(forward, batches, list, predictor.device, "batch_size", tf32=tf32)
    with convolution.register_forward_pre_hook(lambda _, inputs: setattr(of_thread, "map", inputs[0])):
        for batch, (*detections, of_batch) in computed:
            for (frame, found), row in zip(located(batch, detections), of_batch, strict=True):
                yield frame, found, (row / row.norm().clamp(min=1e-12)).numpy()
