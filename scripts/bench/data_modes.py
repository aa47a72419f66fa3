"""The ways to make a training sample that scripts/bench/data.py compares."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import cv2
import numpy as np
import torch

import data.images
from conf.schema import TrainConfig
from data import (
    Annotations,
    Colour,
    ImageCache,
    ImageSource,
    MultiScale,
    Request,
    TrainBatchSampler,
    TrainDataset,
    build_image_cache,
    open_annotations,
)
from data.images import AS_STORED
from scripts.bench.reference_path import reference_sample

BATCH_SIZE = 16
LISTED = 100_000  # images, as a large training set has them


class Mode(NamedTuple):
    """One way to make training samples."""

    cached: bool = False  # decoded images from data.cache, not files
    colour: Colour = Colour.cpu
    tile_pool: int = 0
    as_listed: bool = False  # the set itself, not listed many times
    opencv_alone: bool = False  # without simplejpeg
    reference: bool = False  # as published systems do, step by step


REFERENCE = "plain reference path"
MODES = {
    REFERENCE: Mode(reference=True),
    "default, by OpenCV alone": Mode(opencv_alone=True),
    "colour on the device, by OpenCV alone": Mode(colour=Colour.device, opencv_alone=True),
    "default": Mode(),
    "default, as listed": Mode(as_listed=True),
    "colour on the device": Mode(colour=Colour.device),
    "colour on the device, as listed": Mode(colour=Colour.device, as_listed=True),
    "tiles from a pool": Mode(tile_pool=BATCH_SIZE),
    "tiles from a pool, colour on the device": Mode(colour=Colour.device, tile_pool=BATCH_SIZE),
    "cached": Mode(cached=True),
    "cached, colour on the device": Mode(cached=True, colour=Colour.device),
}
if not find_spec("simplejpeg"):
    MODES = {name: mode for name, mode in MODES.items() if not mode.opencv_alone}


class RepeatedSource(ImageSource):
    """Images of a set listed many times; counts those decoded and the share of their rows."""

    images, share = 0, 0.0

    def read(self, index: int, rows: int | None = None) -> np.ndarray | None:
        """Read an image as ImageSource does, by its number in the long list."""
        index %= len(self.annotations)
        self.images += 1
        self.share += 1 if rows is None else min(1, rows / self.annotations.sizes[index, 0])
        return super().read(index, rows)


def repeated(annotations: Annotations, times: int) -> Annotations:
    """List images and boxes many times, for training samples alone: no names."""
    ends = annotations.offsets[-1] * np.arange(times)[:, None] + annotations.offsets[1:]
    names = ("image_ids", "sizes", "boxes_xywh", "classes", "crowd", "areas")
    columns: dict[str, Any] = {name: np.concatenate([getattr(annotations, name)] * times) for name in names}
    return replace(annotations, offsets=np.concatenate([[0], ends.reshape(-1)]), **columns)


class Bench:
    """The modes to compare, on the images of one training set."""

    def __init__(self, config: TrainConfig, cache_path: Path) -> None:
        self.config = config
        self.side = config.train.image_size
        self.listed = open_annotations(config.data, "train")
        self.samples = len(self.listed) // BATCH_SIZE * BATCH_SIZE  # of one measurement
        self.annotations = repeated(self.listed, -(-LISTED // len(self.listed)))
        self.files = RepeatedSource(self.listed, config.data.on_error)
        build_image_cache(self.files, cache_path, ImageCache.ram)
        self.cached = RepeatedSource(self.listed, config.data.on_error, cache_path)
        self.epochs = iter(range(10**9))

    def milliseconds(self, mode: Mode) -> float:
        """CPU time of one sample, in ms."""
        batches = self.requests(mode)
        started = time.process_time()
        with patch.object(data.images, "simplejpeg", None) if mode.opencv_alone else nullcontext():
            self.make(mode, batches, self.cached if mode.cached else self.files)
        return (time.process_time() - started) / self.samples * 1000

    def make(self, mode: Mode, batches: list[list[Request]], images: ImageSource) -> None:
        """Make the samples of all batches."""
        dataset = self.dataset(mode, images)
        for requests in batches:
            if mode.reference:
                self.reference_batch(dataset, requests)
            else:
                dataset.__getitems__(requests)

    def batches(self, mode: Mode) -> TrainBatchSampler:
        """The requests of another epoch each time."""
        sampler = TrainBatchSampler(
            num_images=len(self.listed if mode.as_listed else self.annotations),
            batch_size=BATCH_SIZE,
            micro_batch_size=BATCH_SIZE,
            world_size=1,
            rank=0,
            seed=0,
            sizes=MultiScale(self.side, 1, 1, 32, 0),
            tile_pool=mode.tile_pool,
        )
        sampler.set_epoch(next(self.epochs))
        return sampler

    def dataset(self, mode: Mode, images: ImageSource) -> TrainDataset:
        """The training set as ``mode`` reads and augments it."""
        annotations = self.listed if mode.as_listed else self.annotations
        return TrainDataset(annotations, replace(self.config.augment, colour=mode.colour), 0, 10**9, images)

    def requests(self, mode: Mode) -> list[list[Request]]:
        """``samples`` samples as batches; made before timing, since an epoch does this once."""
        return list(islice(self.batches(mode), self.samples // BATCH_SIZE))

    def reference_batch(self, dataset: TrainDataset, requests: list[Request]) -> torch.Tensor:
        """Make a batch as published systems do: turn each sample to planes, then stack them."""
        samples = []
        for request in requests:
            image, _, _ = reference_sample(dataset.plan(request), self.annotations, self.read_file)
            samples.append(torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))))
        return torch.stack(samples)

    def read_file(self, index: int) -> np.ndarray:
        """Decode an image with OpenCV."""
        path = self.files.annotations.path(index % len(self.files.annotations))
        return np.asarray(cv2.imread(path, AS_STORED), dtype=np.uint8)
