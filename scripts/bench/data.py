"""CPU time of a training sample relative to a plain implementation, and the loader's speed.

    python -m scripts.bench.data data.root=/data/coco [key=value ...]     # keys as for train.py

Samples have the configured augmentation and come in batches, as in training. A batch decodes an
image once, however often it uses it, which is rare in a large set. So a small set is listed many
times.
"""

import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch

from conf.entry import compose
from conf.schema import TrainConfig
from data import (
    Annotations,
    Colour,
    ImageCache,
    ImageSource,
    MultiScale,
    TrainBatchSampler,
    TrainDataset,
    build_image_cache,
    make_loader,
    open_annotations,
)
from data.images import AS_STORED
from data.loader import PREFETCHED_BATCHES
from scripts.bench.step import take_turns
from tests.data.reference_path import reference_sample
from train_utils.numerics import keep_freed_memory

ROUNDS, LOADER_ROUNDS = 15, 4
BATCH_SIZE = 16
LISTED = 100_000  # images, as a large training set has them
LOADED_BATCHES = 40
SLOWER = 1.5  # times what the loader needs for a batch: a step that it can feed


class Mode(NamedTuple):
    """One way to make training samples."""

    cached: bool = False  # decoded images from data.cache, not files
    colour: Colour = Colour.cpu
    tile_pool: int = 0


REFERENCE = "plain reference path"  # as published systems do, step by step
MODES = {
    "default": Mode(),
    "colour on the device": Mode(colour=Colour.device),
    "tiles from a pool": Mode(tile_pool=BATCH_SIZE),
    "tiles from a pool, colour on the device": Mode(colour=Colour.device, tile_pool=BATCH_SIZE),
    "cached": Mode(cached=True),
    "cached, colour on the device": Mode(cached=True, colour=Colour.device),
}


class RepeatedSource(ImageSource):
    """Images of a set that is listed many times."""

    def read(self, index: int, rows: int | None = None) -> np.ndarray | None:
        """Read an image as ImageSource does, by its number in the long list."""
        return super().read(index % len(self.annotations), rows)


def repeated(annotations: Annotations) -> Annotations:
    """List images and boxes until there are LISTED, for training samples alone: no names."""
    times = -(-LISTED // len(annotations))
    ends = annotations.offsets[-1] * np.arange(times)[:, None] + annotations.offsets[1:]
    names = ("image_ids", "sizes", "boxes_xywh", "classes", "crowd", "areas")
    columns: dict[str, Any] = {name: np.concatenate([getattr(annotations, name)] * times) for name in names}
    return replace(annotations, offsets=np.concatenate([[0], ends.reshape(-1)]), **columns)


class Bench:
    """The ways to make a sample, on the images of one training set."""

    def __init__(self, config: TrainConfig, cache_path: Path) -> None:
        self.config = config
        self.listed = open_annotations(config.data, "train")
        self.annotations = repeated(self.listed)
        self.files = RepeatedSource(self.listed, config.data.on_error)
        build_image_cache(self.files, cache_path, ImageCache.ram)
        self.cached = RepeatedSource(self.listed, config.data.on_error, cache_path)
        self.epochs = iter(range(10**9))

    def open(self, mode: Mode) -> tuple[TrainDataset, TrainBatchSampler]:
        """The training set as ``mode`` reads and augments it, and another epoch of batches."""
        augment = replace(self.config.augment, colour=mode.colour, tile_pool=mode.tile_pool)
        images = self.cached if mode.cached else self.files
        sizes = MultiScale(self.config.train.image_size, 1, 1, 32, 0)
        sampler = TrainBatchSampler(
            len(self.annotations), BATCH_SIZE, BATCH_SIZE, 1, 0, 0, sizes, tile_pool=mode.tile_pool
        )
        sampler.set_epoch(next(self.epochs))
        return TrainDataset(self.annotations, augment, 0, 10**9, images), sampler

    def milliseconds(self, name: str) -> float:
        """CPU time of one sample, in ms."""
        dataset, sampler = self.open(MODES.get(name, Mode()))
        batches = list(islice(sampler, len(self.listed) // BATCH_SIZE))  # an epoch does this once
        started = time.process_time()
        for requests in batches:
            if name != REFERENCE:
                dataset.__getitems__(requests)
                continue
            plans = [dataset.plan(request) for request in requests]
            samples = [reference_sample(plan, self.annotations, self.decode)[0] for plan in plans]
            torch.stack([torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))) for image in samples])
        return (time.process_time() - started) / sum(map(len, batches)) * 1000

    def decode(self, index: int) -> np.ndarray:
        """Decode an image with OpenCV."""
        path = self.listed.path(index % len(self.listed))
        return np.asarray(cv2.imread(path, AS_STORED), dtype=np.uint8)

    def load(self, workers: int, step_seconds: float) -> tuple[float, float]:
        """Mean seconds per batch and mean seconds waited for it, once the workers are ahead."""
        batches = iter(make_loader(*self.open(Mode(colour=self.config.augment.colour)), workers))
        for _ in range(PREFETCHED_BATCHES * workers):  # without these, none would be made ahead
            next(batches)
            time.sleep(step_seconds)
        started, waited = time.perf_counter(), 0.0
        for _ in range(LOADED_BATCHES):
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            time.sleep(step_seconds)
            del batch  # freeing its pages is not waiting: a training's step does it, too
        return (time.perf_counter() - started) / LOADED_BATCHES, waited / LOADED_BATCHES


def main(overrides: list[str]) -> None:
    """Measure and print everything for one configuration."""
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    keep_freed_memory()  # as training does
    config = compose("train", TrainConfig, ["data=coco", *overrides])
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        bench = Bench(config, Path(folder) / "cache")
        print(f"{len(bench.listed)} images of {config.data.root}, {config.train.image_size} px")
        times = take_turns({name: partial(bench.milliseconds, name) for name in (REFERENCE, *MODES)}, ROUNDS)
        for name, values in times.items():
            print(f"{name:42s} {median(values):7.2f} ms {median(times[REFERENCE]) / median(values):6.2f}x")
        for number in range(LOADER_ROUNDS):
            one, two = (bench.load(workers, 0.0)[0] for workers in (1, 2))
            total, waited = bench.load(2, SLOWER * two)
            print(
                f"loader, round {number}: {BATCH_SIZE / one:.1f} images/s with a worker, {one / two:.2f}x with two, "
                f"{waited / total:.1%} waiting in a step of {SLOWER} times the loader's"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
