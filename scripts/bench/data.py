"""CPU time of a training sample relative to a plain implementation, and the loader's speed.

    python -m scripts.bench.data data.root=/data/coco [key=value ...]     # keys as for train.py

Samples have the configured augmentation and come in batches, as in training. A batch decodes an
image once, however often it uses it. As it rarely uses one twice in a large set, a small set is
listed many times.
"""

import itertools
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import cv2
import numpy as np
import torch

import data
from conf import schema
from data import images, loader
from scripts.bench.step import configured, take_turns
from tests.data.reference_path import reference_sample
from train_utils import build, distributed, numerics

ROUNDS, LOADER_ROUNDS = 15, 4
BATCH_SIZE = 16
LISTED_IMAGES = 100_000  # as in a large training set
LOADED_BATCHES = 40
OPTIONS = (f"train.batch_size={BATCH_SIZE}", f"train.epochs={10**9}", "augment.colour=cpu")
REFERENCE = "plain reference path"  # as published systems do, step by step
MODES: dict[str, dict[str, Any]] = {  # changes to augment; all but the cached ones read files
    "default": {},
    "colour on the device": {"colour": data.Colour.device},
    "tiles from a pool": {"tile_pool": BATCH_SIZE},
    "tiles from a pool, colour on the device": {"colour": data.Colour.device, "tile_pool": BATCH_SIZE},
    "cached": {},
    "cached, colour on the device": {"colour": data.Colour.device},
}


class RepeatedSource(data.ImageSource):
    """The images of a set that is listed many times."""

    def read(self, index: int, rows: int | None = None) -> np.ndarray | None:
        """Read the image with this number in the long list."""
        return super().read(index % len(self.annotations), rows)


def repeated(annotations: data.Annotations) -> data.Annotations:
    """Repeat images and boxes, but not file names, until there are LISTED_IMAGES."""
    times = -(-LISTED_IMAGES // len(annotations))
    names = ("image_ids", "sizes", "boxes_xywh", "classes", "crowd", "areas")
    columns: dict[str, Any] = {name: np.concatenate([getattr(annotations, name)] * times) for name in names}
    boxes = np.tile(np.diff(annotations.offsets), times)
    return replace(annotations, offsets=np.append(0, boxes.cumsum()), **columns)


class Bench:
    """The ways to make a sample, on the images of one training set."""

    def __init__(self, config: schema.TrainConfig, cache_path: Path) -> None:
        self.config = config
        self.listed = data.open_annotations(config.data, "train")
        self.annotations = repeated(self.listed)
        self.files = RepeatedSource(self.listed, config.data.on_error)
        data.build_image_cache(self.files, cache_path, data.ImageCache.ram)
        self.cached = RepeatedSource(self.listed, config.data.on_error, cache_path)
        self.epochs = iter(range(10**9))

    def open(self, name: str) -> tuple[data.TrainDataset, data.TrainBatchSampler]:
        """The training set as a mode reads and augments it, and the batches of the next epoch."""
        config = replace(self.config, augment=replace(self.config.augment, **MODES.get(name, {})))
        world = distributed.init_distributed_mode("cpu", 60)
        sampler = build.build_sampler(config, self.annotations, 32, world)
        sampler.set_epoch(next(self.epochs))
        source = self.cached if name.startswith("cached") else self.files
        return build.build_dataset(config, self.annotations, source), data.TrainBatchSampler(sampler)

    def milliseconds(self, name: str) -> float:
        """CPU time of one sample, in ms."""
        dataset, sampler = self.open(name)
        drawn = list(itertools.islice(sampler, len(self.listed) // BATCH_SIZE))  # an epoch does this once
        started = time.process_time()
        for requests in drawn:
            if name != REFERENCE:
                dataset.__getitems__(requests)
                continue
            plans = map(dataset.plan, requests)
            samples = [reference_sample(plan, self.annotations, self.decode)[0] for plan in plans]
            torch.from_numpy(np.stack(samples).transpose(0, 3, 1, 2).copy())
        return (time.process_time() - started) / len(drawn) / BATCH_SIZE * 1000

    def decode(self, index: int) -> np.ndarray:
        """Decode an image with OpenCV."""
        return np.asarray(cv2.imread(self.listed.path(index % len(self.listed)), images.AS_STORED), np.uint8)

    def images_per_second(self, workers: int) -> float:
        """Speed of the loader, once its workers are ahead."""
        loaded = iter(data.make_loader(*self.open("default"), workers))
        for _ in range(loader.PREFETCHED_BATCHES * workers):
            next(loaded)
        started = time.perf_counter()
        for _ in range(LOADED_BATCHES):
            next(loaded)
        return LOADED_BATCHES * BATCH_SIZE / (time.perf_counter() - started)


def main(overrides: list[str]) -> None:
    """Measure and print everything for one configuration."""
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    numerics.keep_freed_memory()  # as training does
    config = configured("data=coco", *overrides, *OPTIONS)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        bench = Bench(config, Path(folder) / "cache")
        print(f"{len(bench.listed)} images of {config.data.root}, {config.train.image_size} px")
        times = take_turns(bench.milliseconds, (REFERENCE, *MODES), ROUNDS)
        for name, values in times.items():
            print(f"{name:42s} {median(values):7.2f} ms {median(times[REFERENCE]) / median(values):6.2f}x")
        for _ in range(LOADER_ROUNDS):
            one, two = bench.images_per_second(1), bench.images_per_second(2)
            print(f"loader: {one:.1f} images/s with a worker, {two / one:.2f}x with two")


if __name__ == "__main__":
    print(__doc__) if "--help" in sys.argv else main(sys.argv[1:])
