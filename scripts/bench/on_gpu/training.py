"""How fast a training step is: eager and compiled, one size and several, and in which precision."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import torch

from models import Darknet, count_flops
from scripts.bench.gpu import Rows
from scripts.bench.on_gpu.common import Settings, make_step, new_step, seconds_each, synthetic
from scripts.bench.on_gpu.machine import PEAK
from scripts.bench.on_gpu.profiling import KINDS, Shares, waits
from train_utils.loop.step import OptimiserStep
from train_utils.memory import device_peak
from train_utils.parallel.compiled import CUDA_GRAPHS

PASSES = 3  # a backward pass computes twice what a forward pass does


def eager(settings: Settings, rows: Rows) -> None:
    """Speed, launches, memory, shares and waits of the step that is the default."""
    for images in settings.batches:
        step = new_step(settings)
        _speed(settings, rows, step, images, "620 images/s")
    batch = synthetic(settings, images)
    found = waits(lambda: [make_step(step, batch) for _ in range(3)])
    rows.add("waits for the device in three steps", found.total(), reach="3")
    for place, count in found.most_common(6):
        rows.add(f"  {place}", count)


def compiled(settings: Settings, rows: Rows) -> None:
    """The same with train.compile=default, and the seconds that compiling takes."""
    for images in settings.batches[::-1]:
        _compiled(settings, rows, images, "default")


def autotuned(settings: Settings, rows: Rows) -> None:
    """The large batch with train.compile=max-autotune-no-cudagraphs."""
    _compiled(settings, rows, settings.batches[-1], "max-autotune-no-cudagraphs")


def graphs(settings: Settings, rows: Rows) -> None:
    """A small network, whose launches may take longer than its kernels, in CUDA graphs, too."""
    small = replace(settings, model="yolov3-tiny", side=min(settings.side, 416))
    images = small.batches[0]
    batch = synthetic(small, images)
    for mode in ("", "default", CUDA_GRAPHS):
        seconds = seconds_each(partial(make_step, new_step(small, mode=mode)), [batch], small)
        rows.add(f"{small.model}, batch {images}: {mode or 'eager'}", images / seconds, "images/s")


def _compiled(settings: Settings, rows: Rows, images: int, mode: str) -> None:
    step, started = new_step(settings, mode=mode), time.perf_counter()
    make_step(step, synthetic(settings, images))
    rows.add(f"batch {images}: first step", time.perf_counter() - started, "s")
    _speed(settings, rows, step, images, "840 images/s")


def _speed(settings: Settings, rows: Rows, step: OptimiserStep, images: int, reach: str) -> None:
    """Images a second and, for the large batch, what explains it."""
    batch, network = synthetic(settings, images), step.state.model
    assert isinstance(network, Darknet)
    if settings.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = seconds_each(partial(make_step, step), [batch], settings)
    large = images == settings.batches[-1]
    rows.add(f"batch {images}", images / seconds, "images/s", reach if large else "")
    rows.add(f"batch {images}: peak of memory", (device_peak() or 0) / 2**30, "GiB")
    if not large:
        return
    teraflops = PASSES * count_flops(network, (settings.side, settings.side)) * images / seconds / 1e12
    rows.add("arithmetic", teraflops, "TFLOP/s")
    for row in rows.all():
        if row["figure"] == PEAK:
            rows.add(f"share of the {PEAK}", 100 * teraflops / row["value"], "%")
    shares = Shares(step, batch)
    rows.add("kernels launched in a step", shares.launches)
    for kind in KINDS:
        rows.add(kind, 100 * shares.microseconds[kind] / 1e6 / seconds, "%")
    rows.add("device idle", 100 * (1 - shares.busy / 1e6 / seconds), "%", "2 %")


def sizes(settings: Settings, rows: Rows) -> None:
    """Three image sizes in turn against one size, at equal pixels, once all are warm."""
    _sizes(settings, rows, new_step(settings))


def sizes_compiled(settings: Settings, rows: Rows) -> None:
    """The same with train.compile=default."""
    sides = {settings.side, *settings.sides}
    _sizes(settings, rows, new_step(settings, mode="default", sizes=len(sides)))


def _sizes(settings: Settings, rows: Rows, step: OptimiserStep) -> None:
    images, speeds = settings.batches[-1], []
    for sides in ((settings.side,), settings.sides):
        batches = [synthetic(settings, images, side) for side in sides]
        seconds = seconds_each(partial(make_step, step), batches, settings)
        speeds.append(images * sum(side**2 for side in sides) / len(sides) / seconds / 1e6)
        rows.add(f"{', '.join(map(str, sides))} px in turn", speeds[-1], "Mpixel/s")
    rows.add("several sizes against one", 100 * speeds[1] / speeds[0], "%", "95 %")


def losses(settings: Settings, rows: Rows) -> None:
    """The first losses in bfloat16 against those in float32, on the same batches."""
    batches = [synthetic(settings, settings.batches[0], seed=seed) for seed in range(4)]
    found = []
    for precision in ("float32", "bfloat16"):
        step = new_step(settings, precision)
        found.append([make_step(step, batches[number % 4]) for number in range(settings.losses)])
    worst = max(abs(other - exact) / exact for exact, other in zip(*found, strict=True))
    rows.add(f"bfloat16 against float32, worst of {settings.losses} losses", 100 * worst, "%", "2 %")
    rows.add("losses in float32, first and last", f"{found[0][0]:.4g} {found[0][-1]:.4g}")
