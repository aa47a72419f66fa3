"""The ways to make a training sample that scripts/bench/data.py compares."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import cv2
import numpy as np
import torch

import data.files.jpeg
from conf.schema import TrainConfig
from data import (
    Annotations,
    CachedImages,
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
from data.images.source import AS_STORED
from scripts.bench.reference_path import reference_sample

BATCH_SIZE = 16
LISTED = 100_000  # images, as a large training set has them


class RepeatedSource(ImageSource):
    """The images of a set that is listed many times over; counts those that are decoded, and how
    much of them.
    """

    images, share = 0, 0.0

    def read(self, index: int, rows: int | None = None) -> np.ndarray | None:
        index %= len(self.annotations)
        self.images += 1
        self.share += 1 if rows is None else min(1, rows / self.annotations.sizes[index, 0])
        return super().read(index, rows)


def repeated(annotations: Annotations, times: int) -> Annotations:
    """The images and boxes so many times over, for training samples alone: without names and
    outlines.
    """
    ends = annotations.offsets[-1] * np.arange(times)[:, None] + annotations.offsets[1:]
    return replace(
        annotations,
        image_ids=np.concatenate([annotations.image_ids] * times),
        sizes=np.concatenate([annotations.sizes] * times),
        offsets=np.concatenate([[0], ends.reshape(-1)]),
        boxes_xywh=np.concatenate([annotations.boxes_xywh] * times),
        classes=np.concatenate([annotations.classes] * times),
        crowd=np.concatenate([annotations.crowd] * times),
        areas=np.concatenate([annotations.areas] * times),
    )


Batches = list[list[Request]]


class Mode(NamedTuple):
    """A way to make samples, the size of its pool of tiles, and whether it is of the set as it is
    listed.
    """

    make: Callable[[Batches], None]
    tile_pool: int = 0
    as_listed: bool = False


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
        self.cached = RepeatedSource(self.listed, config.data.on_error, CachedImages(cache_path, self.listed))
        self.epochs = iter(range(10**9))

    def modes(self) -> dict[str, Mode]:
        """By name, how samples are made."""
        modes = {"plain reference path": Mode(self.reference)}
        if find_spec("simplejpeg"):
            modes["default, by OpenCV alone"] = Mode(partial(self.opencv_alone, self.files, Colour.cpu))
            modes["colour on the device, by OpenCV alone"] = Mode(partial(self.opencv_alone, self.files, Colour.device))
        return modes | {
            "default": Mode(partial(self.fused, self.files, Colour.cpu)),
            "default, as listed": Mode(partial(self.fused, self.files, Colour.cpu, as_listed=True), as_listed=True),
            "colour on the device": Mode(partial(self.fused, self.files, Colour.device)),
            "colour on the device, as listed": Mode(
                partial(self.fused, self.files, Colour.device, as_listed=True), as_listed=True
            ),
            "tiles from a pool": Mode(partial(self.fused, self.files, Colour.cpu), BATCH_SIZE),
            "tiles from a pool, colour on the device": Mode(partial(self.fused, self.files, Colour.device), BATCH_SIZE),
            "cached": Mode(partial(self.fused, self.cached, Colour.cpu)),
            "cached, colour on the device": Mode(partial(self.fused, self.cached, Colour.device)),
        }

    def batches(self, tile_pool: int = 0, as_listed: bool = False) -> TrainBatchSampler:
        """The requests of another epoch each time."""
        sampler = TrainBatchSampler(
            num_images=len(self.listed if as_listed else self.annotations),
            batch_size=BATCH_SIZE,
            device_batch_size=BATCH_SIZE,
            world_size=1,
            rank=0,
            seed=0,
            sizes=MultiScale(self.side, 1, 1, 32, 0),
            tile_pool=tile_pool,
        )
        sampler.set_epoch(next(self.epochs))
        return sampler

    def dataset(self, images: ImageSource, colour: Colour, as_listed: bool = False) -> TrainDataset:
        annotations = self.listed if as_listed else self.annotations
        return TrainDataset(annotations, replace(self.config.augment, colour=colour), 0, 10**9, images)

    def requests(self, tile_pool: int, as_listed: bool = False) -> Batches:
        """``samples`` samples as batches, made before the clock runs: the start of an epoch is
        shared by all of it.
        """
        return list(islice(self.batches(tile_pool, as_listed), self.samples // BATCH_SIZE))

    def fused(self, images: ImageSource, colour: Colour, batches: Batches, as_listed: bool = False) -> None:
        dataset = self.dataset(images, colour, as_listed)
        for requests in batches:
            dataset.__getitems__(requests)

    def opencv_alone(self, images: ImageSource, colour: Colour, batches: Batches) -> None:
        with without_simplejpeg():
            self.fused(images, colour, batches)

    def reference(self, batches: Batches) -> None:
        dataset = self.dataset(self.files, Colour.cpu)
        for requests in batches:
            self.reference_batch(dataset, requests)

    def reference_batch(self, dataset: TrainDataset, requests: list[Request]) -> torch.Tensor:
        """A batch as the published systems make it: each sample turned to planes, then all of them
        stacked.
        """
        samples = []
        for request in requests:
            image, _, _ = reference_sample(
                dataset.plan(request), self.annotations, self.read_file, self.config.augment.min_visible
            )
            samples.append(torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))))
        return torch.stack(samples)

    def read_file(self, index: int) -> np.ndarray:
        path = self.files.annotations.path(index % len(self.files.annotations))
        return np.asarray(cv2.imread(path, AS_STORED), dtype=np.uint8)


def without_simplejpeg() -> AbstractContextManager[object]:
    return patch.object(data.files.jpeg, "simplejpeg", None)
