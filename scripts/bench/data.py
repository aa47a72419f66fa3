"""CPU time of a training sample relative to a plain implementation, and the loader's speed.

    python -m scripts.bench.data data.root=/data/coco [key=value ...]     # keys as for train.py

Samples have the configured augmentation and come in batches, as in training. A batch decodes an
image once, however often it uses it, which is rare in a large set. So a small set is listed many
times; the modes "as listed" use the set itself.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # before torch is imported
    print(__doc__)
    raise SystemExit

import tempfile
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import cv2
import torch

from conf.entry import compose
from conf.schema import TrainConfig
from data import make_loader
from data.loader import PREFETCHED_BATCHES
from scripts.bench.data_modes import BATCH_SIZE, MODES, REFERENCE, Bench, Mode, RepeatedSource
from scripts.bench.rounds import medians, take_turns
from train_utils.numerics import keep_freed_memory

ROUNDS = 15
LOADER_ROUNDS = 4
LOADED_BATCHES = 40
SLOWER = (1.5, 2.0)  # times what the loader needs for a batch: steps that it can feed


def compare_modes(bench: Bench) -> None:
    """Print the CPU time per sample of each mode, and the speed relative to the reference."""
    times = take_turns({name: partial(bench.milliseconds, mode) for name, mode in MODES.items()}, ROUNDS)
    typical = medians(times)
    print(f"{'one sample':42s} {'ms':>7s} {'speed':>7s}   fastest round against fastest")
    for name, median in typical.items():
        fastest = min(times[REFERENCE]) / min(times[name])
        print(f"{name:42s} {median:7.2f} {typical[REFERENCE] / median:6.2f}x   {fastest:5.2f}x")
    device, cached = typical["colour on the device"], typical["cached, colour on the device"]
    parts = {"decoding": device - cached, "colour": typical["default"] - device, "plan, pixels and boxes": cached}
    shares = ", ".join(f"{name} {value / typical['default']:.0%}" for name, value in parts.items())
    print(f"default: {shares}")
    for name in ("default", "tiles from a pool"):
        counting = RepeatedSource(bench.files.annotations, bench.config.data.on_error)
        bench.make(MODES[name], bench.requests(MODES[name]), counting)
        print(
            f"{name}: {counting.images / bench.samples:.2f} images decoded per sample, "
            f"{counting.share / counting.images:.0%} of their rows needed"
        )


def compare_loaders(bench: Bench) -> None:
    """Print what a second worker brings, and how long a slower step still waits for its batch."""
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
    """Mean seconds per batch and mean seconds waited for it, once the workers are ahead."""
    dataset = bench.dataset(Mode(colour=bench.config.augment.colour), bench.files)
    batches = iter(make_loader(dataset, bench.batches(Mode()), workers))
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
        print(
            f"{len(bench.files.annotations)} images of {config.data.root}, {bench.side} px, OpenCV {cv2.__version__}, "
            f"simplejpeg {'installed' if find_spec('simplejpeg') else 'not installed'}"
        )
        compare_modes(bench)
        compare_loaders(bench)


if __name__ == "__main__":
    main(sys.argv[1:])
