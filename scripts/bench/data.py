"""CPU time of one training sample, against the plain way to make it; and whether the loader keeps up with a step.

    python -m scripts.bench.data data.root=/data/coco [key=value ...]     # keys as for train.py

The samples are those of the augmentation that is configured. All modes take turns in each of several rounds; ratios are
those of medians.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import torch

import data.jpeg
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
from data.images import AS_STORED
from data.reference_path import reference_sample

BATCH_SIZE = 16
ROUNDS = 7
LOADER_ROUNDS = 4
LOADED_BATCHES = 40
SLOWER = (1.5, 2.0)  # times what the loader needs for a batch: steps that it can feed


class CountingSource(ImageSource):
    """Counts the images that are decoded, and how much of them."""

    images, share = 0, 0.0

    def read(self, index: int, rows: int | None = None) -> np.ndarray | None:
        self.images += 1
        self.share += 1 if rows is None else min(1, rows / self.annotations.sizes[index, 0])
        return super().read(index, rows)


class Bench:
    """The modes to compare, on the images of one training set."""

    def __init__(self, config: TrainConfig, cache_path: Path) -> None:
        self.config = config
        self.side = config.train.image_size
        self.annotations: Annotations = open_annotations(config.data, "train")
        self.files = ImageSource(self.annotations, config.data.on_error)
        build_image_cache(self.files, cache_path, ImageCache.ram)
        self.cached = ImageSource(self.annotations, config.data.on_error, CachedImages(cache_path, self.annotations))
        self.epochs = iter(range(10**9))

    def modes(self) -> dict[str, Callable[[], int]]:
        """By name, a function that makes an epoch of samples and returns their number."""
        modes = {"plain reference path": self.reference}
        if data.jpeg.simplejpeg is not None:
            modes["default, by OpenCV alone"] = lambda: self.opencv_alone(self.files, Colour.cpu)
            modes["colour on the device, by OpenCV alone"] = lambda: self.opencv_alone(self.files, Colour.device)
        return modes | {
            "default": lambda: self.fused(self.files, Colour.cpu),
            "colour on the device": lambda: self.fused(self.files, Colour.device),
            "tiles from a pool": lambda: self.fused(self.files, Colour.cpu, BATCH_SIZE),
            "tiles from a pool, colour on the device": lambda: self.fused(self.files, Colour.device, BATCH_SIZE),
            "cached": lambda: self.fused(self.cached, Colour.cpu),
            "cached, colour on the device": lambda: self.fused(self.cached, Colour.device),
        }

    def batches(self, tile_pool: int = 0, epochs_in_one: int = 1) -> TrainBatchSampler:
        """The requests of another epoch each time."""
        sampler = TrainBatchSampler(
            num_images=len(self.annotations),
            batch_size=BATCH_SIZE,
            device_batch_size=BATCH_SIZE,
            world_size=1,
            rank=0,
            seed=0,
            sizes=MultiScale(self.side, 1, 1, 32, 0),
            factors=np.full(len(self.annotations), float(epochs_in_one)) if epochs_in_one > 1 else None,
            tile_pool=tile_pool,
        )
        sampler.set_epoch(next(self.epochs))
        return sampler

    def dataset(self, images: ImageSource, colour: Colour) -> TrainDataset:
        return TrainDataset(self.annotations, replace(self.config.augment, colour=colour), 0, 10**9, images)

    def fused(self, images: ImageSource, colour: Colour, tile_pool: int = 0) -> int:
        dataset, samples = self.dataset(images, colour), 0
        for requests in self.batches(tile_pool):
            # In a small set the random tiles of a batch are often the same images, which would be decoded once: so a
            # batch of one, but for a pool, whose point is just that.
            for batch in [requests] if tile_pool else [[request] for request in requests]:
                samples += len(dataset.__getitems__(batch).indices)
        return samples

    def opencv_alone(self, images: ImageSource, colour: Colour) -> int:
        with without_simplejpeg():
            return self.fused(images, colour)

    def reference(self) -> int:
        dataset = self.dataset(self.files, Colour.cpu)
        return sum(len(self.reference_batch(dataset, requests)) for requests in self.batches())

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
        return np.asarray(cv2.imread(str(self.annotations.path(index)), AS_STORED), dtype=np.uint8)


@contextmanager
def without_simplejpeg() -> Iterator[None]:
    module, data.jpeg.simplejpeg = data.jpeg.simplejpeg, None
    try:
        yield
    finally:
        data.jpeg.simplejpeg = module


def compare_modes(bench: Bench) -> None:
    """Print milliseconds of CPU time for a sample of each mode, and how much faster than the reference that is."""
    modes = bench.modes()
    times: dict[str, list[float]] = {name: [] for name in modes}
    for _ in range(ROUNDS):
        for name, make in modes.items():
            started = time.process_time()
            samples = make()
            times[name].append((time.process_time() - started) / samples * 1000)
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
        counting = CountingSource(bench.annotations, bench.config.data.on_error)
        samples = bench.fused(counting, Colour.device, tile_pool)
        print(
            f"{name}: {counting.images / samples:.2f} images decoded for a sample, "
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
    """Seconds for a batch and seconds waited for it, on average, once all workers are under way."""
    dataset = bench.dataset(bench.files, bench.config.augment.colour)
    repeats = -(-2 * LOADED_BATCHES * BATCH_SIZE // len(bench.annotations))
    batches = iter(make_loader(dataset, bench.batches(epochs_in_one=repeats), workers, pin_memory=False))
    for _ in range(2 * workers):
        next(batches)
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
    config = compose("train", TrainConfig, ["data=coco", *overrides])
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        bench = Bench(config, Path(folder) / "cache")
        print(
            f"{len(bench.annotations)} images of {config.data.root}, {bench.side} px, OpenCV {cv2.__version__}, "
            f"simplejpeg {'not installed' if data.jpeg.simplejpeg is None else 'installed'}"
        )
        compare_modes(bench)
        compare_loaders(bench)


if __name__ == "__main__":
    main(sys.argv[1:])
