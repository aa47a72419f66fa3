"""CPU time of one training sample, against the plain way to make it; and whether the loader keeps
up with a step.

    python -m scripts.bench.data data.root=/data/coco [key=value ...]     # keys as for train.py

The samples are those of the augmentation that is configured, in batches as training makes them. A
small set is listed many times over: as in a large one, the images of a batch are then seldom the
same, which would be decoded once; "as listed" is the set as it is. All modes take turns in each of
several rounds; ratios are those of medians.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import cv2
import torch

from conf.entry import compose
from conf.schema import TrainConfig
from data import Colour, make_loader
from data.batches.loader import PREFETCHED_BATCHES
from scripts.bench.data_modes import BATCH_SIZE, Bench, RepeatedSource
from train_utils.numerics import keep_freed_memory

ROUNDS = 15
LOADER_ROUNDS = 4
LOADED_BATCHES = 40
SLOWER = (1.5, 2.0)  # times what the loader needs for a batch: steps that it can feed


def compare_modes(bench: Bench) -> None:
    """Print milliseconds of CPU time for a sample of each mode, and how much faster than the
    reference that is.
    """
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
    """Print what a second worker brings, and how long a step that is slower than the loader waits
    for its batch.
    """
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
    """Seconds for a batch and seconds waited for it, on average, once the workers are as far ahead
    as they get.
    """
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
            f"simplejpeg {'installed' if find_spec('simplejpeg') else 'not installed'}"
        )
        compare_modes(bench)
        compare_loaders(bench)


if __name__ == "__main__":
    main(sys.argv[1:])
