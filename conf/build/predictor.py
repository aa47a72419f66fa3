"""A detector at work: network and suppression as configured, and boxes on the frames themselves."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from conf.build.network import TrainedNetwork
from conf.schema import EvaluateConfig
from conf.schema_inference import DemoConfig, PicturesConfig
from data import Frame, FrameBatch, FrameBatches, InputFit, Medium, OnBadFile, cut_at_edges
from models import Head, Postprocess, for_detection
from train_utils.config import EvalPrecision
from train_utils.loop.detect import detect_batches
from train_utils.numerics import autocast_dtype

GPU_BATCH_SIZE = 8  # on a CPU it is 1, because threads process several batches at a time


class Found(NamedTuple):
    """The detections on one frame, best first."""

    boxes_xyxy: np.ndarray  # float64 (n, 4) in pixels of the frame, clipped to it
    classes: np.ndarray  # int (n,)
    scores: np.ndarray  # float64 (n,)


class Predictor:
    """The network and its suppression; threads may share it.

    ``seconds`` sums the time of all calls, over threads.
    """

    def __init__(self, config: PicturesConfig | DemoConfig, detector: TrainedNetwork, device: torch.device) -> None:
        self.dtype = autocast_dtype(config.precision.value, device, "precision")
        self.model, self.device = for_detection(detector.model.to(device), device), device
        self.fit = InputFit(detector.image_size, detector.model.max_stride, config.resize, config.rect)
        self.config = config
        self.postprocess = suppression(config, self.model.heads)
        self.seconds, self._adding = 0.0, Lock()

    def __call__(self, images: Tensor) -> list[Tensor]:
        """Detections (n, 6) of each of the images (B, 3, H, W) in 0..1, best first, on the CPU.

        The columns are x1, y1, x2, y2 in pixels of the network's input, score and class.
        """
        started = time.perf_counter()
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            raw_maps = self.model(images)
        detections = self.postprocess(raw_maps)
        with self._adding:
            self.seconds += time.perf_counter() - started
        return detections

    def at(self, confidence: float, nms_iou: float) -> Predictor:
        """The same network with other limits of its suppression."""
        other = copy(self)
        limits = replace(self.config, confidence=confidence, nms_iou=nms_iou)
        other.postprocess = suppression(limits, self.model.heads)
        return other

    def frames(self, media: list[Medium], on_error: OnBadFile | None = None) -> FrameBatches:
        """The frames of ``media`` in batches; ``on_error`` stands in for the option."""
        config = self.config
        assert not isinstance(config, DemoConfig)
        size = config.batch_size or (1 if self.device.type == "cpu" else GPU_BATCH_SIZE)
        return FrameBatches(media, self.fit, size, config.exif, on_error or config.on_error, config.workers)

    def found(self, batches: Iterable[FrameBatch]) -> Iterator[tuple[Frame, Found]]:
        """Each frame of the batches with its detections, in order, without boxes in the padding."""
        tf32 = self.config.precision is EvalPrecision.tf32
        for batch, detections in detect_batches(self, batches, list, self.device, tf32=tf32):
            for frame, letterbox, rows in zip(batch.frames, batch.letterboxes, detections, strict=True):
                table = rows.double().numpy()
                boxes = cut_at_edges(letterbox.to_original(table[:, :4]), frame.size)
                inside = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
                yield frame, Found(boxes[inside], table[inside, 5].astype(int), table[inside, 4])


def suppression(config: PicturesConfig | DemoConfig | EvaluateConfig, heads: Sequence[Head]) -> Postprocess:
    """What turns the raw maps of ``heads`` into detections."""
    return Postprocess(
        heads,
        confidence=config.confidence,
        nms_iou=config.nms_iou,
        max_detections=config.max_detections,
        multi_label=config.multi_label,
        merge=config.merge_nms,
    )
