"""Seconds of a training step on this machine's CPU, for what changes its speed and not its meaning.

    python -m scripts.bench.step [model] [image size] [batch size] [rounds]

Every variant runs in a process of its own, in turn, round after round; the ratios are those of the
medians.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from typing import NamedTuple

import torch
from torch import nn

from models import Darknet, IouKind, LossConfig, YoloLoss, zoo_cfg
from train_utils.distributed import convert_sync_batchnorm, gradient_exchange, init_distributed_mode, wrap_model
from train_utils.loop.interfaces import Loss
from train_utils.numerics import has_native_bfloat16, keep_freed_memory
from train_utils.parallel.image_sums import ImagewiseLoss


class Variant(NamedTuple):
    """What a step is made with."""

    bfloat16: bool = False
    channels_last: bool = False
    keep: bool = False  # memory between steps
    global_norm: bool = False  # train.sync_bn
    by_image: bool = False  # train.deterministic


VARIANTS = {
    "float32": Variant(),
    "float32, memory kept": Variant(keep=True),
    "float32, channels_last, memory kept": Variant(channels_last=True, keep=True),
    "the same, sync_bn": Variant(channels_last=True, keep=True, global_norm=True),
    "the same, sync_bn, deterministic": Variant(channels_last=True, keep=True, global_norm=True, by_image=True),
    "bfloat16, memory kept": Variant(bfloat16=True, keep=True),
    "bfloat16, channels_last": Variant(bfloat16=True, channels_last=True),
    "bfloat16, channels_last, memory kept": Variant(bfloat16=True, channels_last=True, keep=True),
}
WARM_UP, COUNTED = 3, 6


def measure(
    variant: str, model_name: str, image_size: int, batch_size: int, results: multiprocessing.Queue[float]
) -> None:
    """Put the median seconds of a step (forward, loss, backward, update) into ``results``."""
    chosen = VARIANTS[variant]
    if chosen.keep:
        keep_freed_memory()
    torch.manual_seed(0)
    darknet = Darknet(zoo_cfg(model_name), num_classes=3)
    layout = torch.channels_last if chosen.channels_last else torch.contiguous_format
    model: nn.Module = darknet.to(memory_format=layout)
    world = init_distributed_mode("cpu", 60)
    if chosen.global_norm:
        model = convert_sync_batchnorm(model, world)
    model = wrap_model(model, world, seed=0 if chosen.by_image else None)
    images = torch.rand(batch_size, 3, image_size, image_size).to(memory_format=layout)
    targets = torch.rand(8 * batch_size, 6) * image_size / 2
    targets[:, 0] = torch.arange(8 * batch_size) % batch_size
    targets[:, 1] = torch.arange(8 * batch_size) % 3
    config = LossConfig("yolov3", 3.54, 64.3, 37.4, IouKind.giou, 0.2, 1.0, 1.0, 0.0, 0.0)
    loss: Loss = YoloLoss(darknet.heads, config)
    if chosen.by_image:
        loss = ImagewiseLoss(loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True)
    seconds = []
    for _ in range(WARM_UP + COUNTED):
        started = time.perf_counter()
        with gradient_exchange(model, last=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=chosen.bfloat16):
                raw_maps = model(images)
            parts = loss(raw_maps, targets, objectness_ratio=1.0, sum_over_ranks=lambda counts: counts, world_size=1)
            parts.total.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - started)
    results.put(statistics.median(seconds[WARM_UP:]))


def main(model_name: str = "yolov3-tiny", image_size: str = "320", batch_size: str = "16", rounds: str = "3") -> None:
    """Measure all variants and print their medians and ratios."""
    context = multiprocessing.get_context("spawn")
    here = [
        name for name, variant in VARIANTS.items() if has_native_bfloat16(torch.device("cpu")) or not variant.bfloat16
    ]
    seconds: dict[str, list[float]] = {variant: [] for variant in here}
    for _ in range(int(rounds)):
        for variant in here:
            results: multiprocessing.Queue[float] = context.Queue()
            arguments = (variant, model_name, int(image_size), int(batch_size), results)
            process = context.Process(target=measure, args=arguments)
            process.start()
            seconds[variant].append(results.get())
            process.join()
    base = statistics.median(seconds["float32"])
    print(f"{model_name}, {image_size} px, batch {batch_size}, {torch.get_num_threads()} threads")
    for variant, found in seconds.items():
        median = statistics.median(found)
        print(f"{variant:40s} {median:7.3f} s/step  {base / median:5.2f}x")


if __name__ == "__main__":
    main(*sys.argv[1:])
