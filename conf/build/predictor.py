"""A detector at work: network and suppression as configured, and boxes on the frames themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from conf.build.network import TrainedNetwork
from conf.schema import DetectConfig, EvaluateConfig, PredictConfig
from data import Frame, FrameBatch, FrameBatches, InputFit, Medium, OnBadFile, cut_at_edges
from models import Head, Postprocess, for_detection
from train_utils.config import EvalPrecision
from train_utils.detect import detect_batches
from train_utils.numerics import autocast_dtype

GPU_BATCH_SIZE = 8  # on a CPU it is 1, because threads process several batches at a time


class Found(NamedTuple):
    """The detections on one frame, best first."""

    boxes_xyxy: np.ndarray  # float64 (n, 4) in pixels of the frame, clipped to it
    classes: np.ndarray  # int (n,)
    scores: np.ndarray  # float64 (n,)


class Predictor:
    """The network and its suppression; threads may share it."""

    def __init__(self, config: DetectConfig, detector: TrainedNetwork, device: torch.device) -> None:
        self.dtype = autocast_dtype(config.precision.value, device, "precision")
        self.model, self.device = for_detection(detector.model.to(device), device), device
        self.fit = InputFit(detector.image_size, detector.model.max_stride, config.resize, config.rect)
        self.config = config
        self.postprocess = suppression(config, self.model.heads)

    def at(self, confidence: float, nms_iou: float) -> Predictor:
        """The same network with other limits of its suppression."""
        other = copy(self)
        limits = replace(self.config, confidence=confidence, nms_iou=nms_iou)
        other.postprocess = suppression(limits, self.model.heads)
        return other

    def frames(self, media: list[Medium], on_error: OnBadFile | None = None) -> FrameBatches:
        """The frames of ``media`` in batches; ``on_error`` stands in for the option."""
        config = self.config
        assert isinstance(config, PredictConfig)
        size = config.batch_size or (1 if self.device.type == "cpu" else GPU_BATCH_SIZE)
        return FrameBatches(media, self.fit, size, config.exif, on_error or config.on_error, config.workers)

    def found(self, batches: Iterable[FrameBatch]) -> Iterator[tuple[Frame, Found]]:
        """Each frame of the batches with its detections, in order, without boxes in the padding."""
        tf32 = self.config.precision is EvalPrecision.tf32
        detected = detect_batches(self.model, batches, self.postprocess, self.device, self.dtype, tf32)
        for batch, detections in detected:
            for frame, letterbox, rows in zip(batch.frames, batch.letterboxes, detections, strict=True):
                table = rows.double().numpy()
                boxes = cut_at_edges(letterbox.to_original(table[:, :4]), frame.size)
                inside = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
                yield frame, Found(boxes[inside], table[inside, 5].astype(int), table[inside, 4])


def suppression(config: DetectConfig | EvaluateConfig, heads: Sequence[Head]) -> Postprocess:
    """What turns the raw maps of ``heads`` into detections."""
    return Postprocess(
        heads,
        confidence=config.confidence,
        nms_iou=config.nms_iou,
        max_detections=config.max_detections,
        multi_label=config.multi_label,
        merge=config.merge_nms,
    )
