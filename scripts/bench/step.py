"""Seconds of a training step on this machine's CPU, for variants of the same meaning.

    python -m scripts.bench.step [model] [image size] [batch size] [rounds]

Each variant runs in a fresh process, since memory settings last.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # before torch is imported
    print(__doc__)
    raise SystemExit

import statistics
import time
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from models import Darknet, IouKind, LossConfig, YoloLoss, zoo_cfg
from scripts.bench.rounds import in_fresh_process, medians, take_turns
from train_utils.distributed import init_distributed_mode
from train_utils.loop.interfaces import Loss
from train_utils.numerics import has_native_bfloat16, keep_freed_memory
from train_utils.parallel.image_sums import ImagewiseLoss
from train_utils.parallel.wrap import convert_sync_batchnorm, gradient_sync, wrap_model


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


def measure(variant: str, model_name: str, image_size: int, batch_size: int) -> float:
    """Median seconds of a step: forward, loss, backward, update."""
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
        with gradient_sync(model, last=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=chosen.bfloat16):
                raw_maps = model(images)
            parts = loss(raw_maps, targets, objectness_ratio=1.0, sum_over_ranks=lambda counts: counts, world_size=1)
            parts.total.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[WARM_UP:])


def main(model_name: str = "yolov3-tiny", image_size: str = "320", batch_size: str = "16", rounds: str = "3") -> None:
    """Measure all variants and print their medians and ratios."""
    size, batch, native = int(image_size), int(batch_size), has_native_bfloat16(torch.device("cpu"))
    here = [name for name, variant in VARIANTS.items() if native or not variant.bfloat16]
    runs = {name: partial(in_fresh_process, measure, name, model_name, size, batch) for name in here}
    seconds = medians(take_turns(runs, int(rounds)))
    print(f"{model_name}, {size} px, batch {batch}, {torch.get_num_threads()} threads")
    for name, value in seconds.items():
        print(f"{name:40s} {value:7.3f} s/step  {seconds['float32'] / value:5.2f}x")


if __name__ == "__main__":
    main(*sys.argv[1:])
