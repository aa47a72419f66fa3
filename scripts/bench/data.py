"""CPU time of one training sample, against the plain way to make it; and whether the loader keeps up with a step.

    python -m scripts.bench.data data.root=/data/coco [key=value ...]     # keys as for train.py

The samples are those of the augmentation that is configured, in batches as training makes them. A small set is listed
many times over: as in a large one, the images of a batch are then seldom the same, which would be decoded once; "as
listed" is the set as it is. All modes take turns in each of several rounds; ratios are those of medians.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import torch

import data.files.jpeg
from conf.entry import compose
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
    make_loader,
    open_annotations,
)
from data.batches.loader import PREFETCHED_BATCHES
from data.images.source import AS_STORED
from data.samples.reference_path import reference_sample
from train_utils.numerics import keep_freed_memory

BATCH_SIZE = 16
ROUNDS = 15
LOADER_ROUNDS = 4
LOADED_BATCHES = 40
LISTED = 100_000  # images, as a large training set has them
SLOWER = (1.5, 2.0)  # times what the loader needs for a batch: steps that it can feed


class RepeatedSource(ImageSource):
    """The images of a set that is listed many times over; counts those that are decoded, and how much of them."""

    images, share = 0, 0.0

    def read(self, index: int, rows: int | None = None) -> np.ndarray | None:
        index %= len(self.annotations)
        self.images += 1
        self.share += 1 if rows is None else min(1, rows / self.annotations.sizes[index, 0])
        return super().read(index, rows)


def repeated(annotations: Annotations, times: int) -> Annotations:
    """The images and boxes so many times over, for training samples alone: without names and outlines."""
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
    """A way to make samples, the size of its pool of tiles, and whether it is of the set as it is listed."""

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
        if data.files.jpeg.simplejpeg is not None:
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
        """``samples`` samples as batches, made before the clock runs: the start of an epoch is shared by all of it."""
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
        """A batch as the published systems make it: each sample turned to planes, then all of them stacked."""
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


@contextmanager
def without_simplejpeg() -> Iterator[None]:
    module, data.files.jpeg.simplejpeg = data.files.jpeg.simplejpeg, None
    try:
        yield
    finally:
        data.files.jpeg.simplejpeg = module


def compare_modes(bench: Bench) -> None:
    """Print milliseconds of CPU time for a sample of each mode, and how much faster than the reference that is."""
    modes = bench.modes()
    times: dict[str, list[float]] = {name: [] for name in modes}
    for _ in range(ROUNDS):
        for name, mode in modes.items():
            batches = bench.requests(mode.tile_pool, mode.as_listed)
            started = time.process_time()
            mode.make(batches)
            times[name].append((time.process_time() - started) / bench.samples * 1000)
    medians = {name: statistics.median(found) for name, found in times.items()}
    base = medians["plain reference path"]
    print(f"{'one sample':42s} {'ms':>7s} {'speed':>7s}   fastest round against fastest")
    for name, median in medians.items():
        fastest = min(times["plain reference path"]) / min(times[name])
        print(f"{name:42s} {median:7.2f} {base / median:6.2f}x   {fastest:5.2f}x")
    device, cached = medians["colour on the device"], medians["cached, colour on the device"]
    parts = {"decoding": device - cached, "colour": medians["default"] - device, "plan, pixels and boxes": cached}
    shares = ", ".join(f"{name} {value / medians['default']:.0%}" for name, value in parts.items())
    print(f"default: {shares}")
    for name, tile_pool in (("default", 0), ("tiles from a pool", BATCH_SIZE)):
        counting = RepeatedSource(bench.files.annotations, bench.config.data.on_error)
        bench.fused(counting, Colour.device, bench.requests(tile_pool))
        print(
            f"{name}: {counting.images / bench.samples:.2f} images decoded for a sample, "
            f"{counting.share / counting.images:.0%} of their rows needed"
        )


def compare_loaders(bench: Bench) -> None:
    """Print what a second worker brings, and how long a step that is slower than the loader waits for its batch."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    waits: dict[float, list[float]] = {slower: [] for slower in SLOWER}
    for _ in range(LOADER_ROUNDS):
        for workers, found in seconds.items():
            found.append(load(bench, workers, 0.0)[0])
        for slower, shares in waits.items():
            total, waited = load(bench, 2, slower * seconds[2][-1])
            shares.append(waited / total)
    ratios = [one / two for one, two in zip(seconds[1], seconds[2], strict=True)]
    print(f"{'loader':42s} images/s")
    for workers, found in seconds.items():
        print(f"{workers} worker(s), best round {BATCH_SIZE / min(found):31.1f}")
    print(f"2 workers against 1, round by round: {' '.join(f'{ratio:.2f}' for ratio in ratios)}")
    for slower, shares in waits.items():
        print(f"waiting in a step of {slower} times the loader's: {' '.join(f'{share:.1%}' for share in shares)}")


def load(bench: Bench, workers: int, step_seconds: float) -> tuple[float, float]:
    """Seconds for a batch and seconds waited for it, on average, once the workers are as far ahead as they get."""
    dataset = bench.dataset(bench.files, bench.config.augment.colour)
    batches = iter(make_loader(dataset, bench.batches(), workers, pin_memory=False))
    for _ in range(PREFETCHED_BATCHES * workers):  # the first come at once, or none would be made ahead
        next(batches)
        time.sleep(step_seconds)
    started, waited = time.perf_counter(), 0.0
    for _ in range(LOADED_BATCHES):
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        time.sleep(step_seconds)
        del batch  # giving its pages back is no waiting, and falls into the step of a training as well
    return (time.perf_counter() - started) / LOADED_BATCHES, waited / LOADED_BATCHES


def main(overrides: list[str]) -> None:
    """Measure and print everything for one configuration."""
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    keep_freed_memory()  # as training does
    config = compose("train", TrainConfig, ["data=coco", *overrides])
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        bench = Bench(config, Path(folder) / "cache")
        print(
            f"{len(bench.files.annotations)} images of {config.data.root}, {bench.side} px, OpenCV {cv2.__version__}, "
            f"simplejpeg {'not installed' if data.files.jpeg.simplejpeg is None else 'installed'}"
        )
        compare_modes(bench)
        compare_loaders(bench)


if __name__ == "__main__":
    main(sys.argv[1:])
