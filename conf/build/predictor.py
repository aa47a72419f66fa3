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
from data import Frame, FrameBatch, FrameBatches, InputFit, Looks, Medium, OnBadFile, cut_at_edges
from data.view_config import Tta
from models import Fusion, Head, Postprocess, Seen, for_detection
from train_utils.config import EvalPrecision
from train_utils.loop.detect import detect_batches
from train_utils.numerics import autocast_dtype

GPU_BATCH_SIZE = 8  # on a CPU it is 1, because threads process several batches at a time
CUT = 0.02  # of a slice's side: a box that ends so near to an inner border goes on beyond it


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
        looks = Looks.of(config, detector.image_size, detector.model.max_stride)
        self.fit = InputFit(looks, detector.model.max_stride, config.resize, config.rect)
        self.config = config
        self.postprocess, self.fusion = suppression(config, looks, self.model.heads)
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
        other.postprocess, other.fusion = suppression(limits, self.fit.looks, self.model.heads)
        return other

    def frames(self, media: list[Medium], on_error: OnBadFile | None = None) -> FrameBatches:
        """The frames of ``media`` in batches; ``on_error`` stands in for the option."""
        config = self.config
        assert not isinstance(config, DemoConfig)
        size = config.batch_size or (1 if self.device.type == "cpu" else GPU_BATCH_SIZE)
        return FrameBatches(media, self.fit, size, config.exif, on_error or config.on_error, config.workers)

    def found(self, batches: Iterable[FrameBatch]) -> Iterator[tuple[Frame, Found]]:
        """Each frame of the batches with its detections, in order, without boxes in the padding."""
        waiting: dict[Frame, dict[int, Found]] = {}  # frames with more views to come
        tf32 = self.config.precision is EvalPrecision.tf32
        for batch, detections in detect_batches(self, batches, list, self.device, "batch_size", tf32=tf32):
            yield from self.located(batch, detections, waiting)

    def located(
        self, batch: FrameBatch, detections: list[Tensor], waiting: dict[Frame, dict[int, Found]]
    ) -> Iterator[tuple[Frame, Found]]:
        """The frames whose last view is in the batch; ``waiting`` keeps the others' detections."""
        rows = zip(batch.frames, batch.letterboxes, batch.views, detections, strict=True)
        for frame, letterbox, view, of_view in rows:
            table = of_view.double().numpy()
            boxes = cut_at_edges(letterbox.to_original(table[:, :4]), frame.size)
            inside = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
            found = Found(boxes[inside], table[inside, 5].astype(int), table[inside, 4])
            seen = self.fit.looks.seen(frame.size)
            if self.fusion is None or len(seen) == 1:
                yield frame, found
                continue
            of_frame = waiting.setdefault(frame, {})
            of_frame[view] = found
            if len(of_frame) == len(seen):
                yield frame, merged(waiting.pop(frame), seen, self.fusion)


def suppression(
    config: PicturesConfig | DemoConfig | EvaluateConfig, looks: Looks, heads: Sequence[Head]
) -> tuple[Postprocess, Fusion | None]:
    """What suppresses the boxes of a view, and what merges those of several views, if there are."""
    average = config.tta == Tta.wbf
    # A fused score is a mean over the views, to which lower ones contribute, too.
    confidence = config.confidence / looks.per_window if average else config.confidence
    postprocess = Postprocess(
        heads,
        confidence=confidence,
        nms_iou=config.nms_iou,
        max_detections=config.max_detections,
        multi_label=config.multi_label,
        merge=config.merge_nms,
    )
    if not config.several:
        return postprocess, None
    margin = CUT * (config.slices or 0)
    return postprocess, Fusion(
        config.nms_iou, config.confidence, config.max_detections, average, looks.per_window, margin
    )


def merged(of_views: dict[int, Found], seen: np.ndarray, fusion: Fusion) -> Found:
    """What all views of a frame found, by their numbers; ``seen`` as Looks.seen gives it."""
    numbers = sorted(of_views)
    boxes, classes, scores = (np.concatenate(column) for column in zip(*(of_views[n] for n in numbers), strict=True))
    windows = np.repeat(seen, [len(of_views[number].scores) for number in numbers], axis=0)
    objects = fusion(Seen(boxes, scores, classes, np.zeros(len(scores), np.int64), windows))
    return Found(objects.boxes_xyxy, objects.classes, objects.scores)
