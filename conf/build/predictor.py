"""A detector at work: network and suppression as configured, and boxes on the frames themselves."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

from conf.build.network import Detector
from conf.schema_inference import DetectConfig
from data import Frame, FrameBatch, InputFit, cut_at_edges
from models import Postprocess, for_detection
from train_utils.distributed import World
from train_utils.loop.detect import detect_batches


class Found(NamedTuple):
    """The detections on one frame, best first."""

    boxes_xyxy: np.ndarray  # float64 (n, 4) in pixels of the frame, clipped to it
    classes: np.ndarray  # int (n,)
    scores: np.ndarray  # float64 (n,)


class Predictor:
    """The network and its suppression, with the sum of its seconds over all calls and threads."""

    def __init__(self, config: DetectConfig, detector: Detector, world: World) -> None:
        self.model, self.device = for_detection(detector.model.to(world.device), world.device), world.device
        self.fit = InputFit(detector.image_size, detector.model.max_stride, config.resize, config.rect)
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
        detections = self.postprocess(self.model(images))
        self._calls.append(time.perf_counter() - started)
        return detections

    def at(self, confidence: float, nms_iou: float) -> Predictor:
        """The same network with other limits of its suppression."""
        other = copy(self)
        other.postprocess = replace(self.postprocess, confidence=confidence, nms_iou=nms_iou)
        return other

    @property
    def seconds(self) -> float:
        """Seconds of all calls together."""
        return sum(self._calls)

    def found(self, batches: Iterable[FrameBatch]) -> Iterator[tuple[Frame, Found]]:
        """Each frame of the batches with its detections, in order, without boxes in the padding."""
        for batch, detections in detect_batches(self, batches, list, self.device, "batch_size"):
            for frame, letterbox, rows in zip(batch.frames, batch.letterboxes, detections, strict=True):
                table = rows.double().numpy()
                boxes = cut_at_edges(letterbox.to_original(table[:, :4]), frame.size)
                inside = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
                yield frame, Found(boxes[inside], table[inside, 5].astype(int), table[inside, 4])
