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
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from conf.build.loss import FOR_FEW_LARGE, REACH
from models import LossConfig, YoloLoss
from scripts.bench.on_gpu.common import BOXES, make_step, new_network, options, settings_of, step_of, synthetic
from scripts.bench.rounds import in_fresh_process, medians, seconds_of, take_turns
from train_utils.distributed import init_distributed_mode
from train_utils.numerics import has_native_bfloat16, keep_freed_memory, one_thread_per_operator
from train_utils.parallel.wrap import convert_sync_batchnorm


class Variant(NamedTuple):
    """What a step is made with."""

    bfloat16: bool = False
    channels_last: bool = False
    keep: bool = False  # memory between steps
    global_norm: bool = False  # train.sync_bn
    by_image: bool = False  # train.deterministic
    few: bool = False  # two boxes in an image instead of many
    by_cost: bool = False  # the loss that auto chooses for few large objects


VARIANTS = {
    "float32": Variant(),
    "float32, memory kept": Variant(keep=True),
    "float32, channels_last, memory kept": Variant(channels_last=True, keep=True),
    "the same, sync_bn": Variant(channels_last=True, keep=True, global_norm=True),
    "the same, sync_bn, deterministic": Variant(channels_last=True, keep=True, global_norm=True, by_image=True),
    "bfloat16, memory kept": Variant(bfloat16=True, keep=True),
    "bfloat16, channels_last": Variant(bfloat16=True, channels_last=True),
    "bfloat16, channels_last, memory kept": Variant(bfloat16=True, channels_last=True, keep=True),
    "the same, few boxes": Variant(bfloat16=True, channels_last=True, keep=True, few=True),
    "the same, few boxes, positives by cost": Variant(True, True, True, few=True, by_cost=True),
}
WARM_UP, COUNTED = 3, 6


def measure(variant: str, model_name: str, image_size: int, batch_size: int) -> float:
    """Median seconds of a step as training makes it: input, forward, loss, backward, update."""
    chosen = VARIANTS[variant]
    if chosen.keep:
        keep_freed_memory()
    small = settings_of(tiny=True)
    settings = replace(small, device=torch.device("cpu"), model=model_name, width=1.0, side=image_size)
    layout = torch.channels_last if chosen.channels_last else torch.contiguous_format
    network, world = new_network(settings).to(memory_format=layout).train(), init_distributed_mode("cpu", 60)
    if chosen.global_norm:
        convert_sync_batchnorm(network, world)
    dtype, seed = torch.bfloat16 if chosen.bfloat16 else None, 0 if chosen.by_image else None
    step, batch = step_of(network, world, dtype, seed), synthetic(settings, batch_size)
    batch = replace(batch, gains=batch.gains[:0])  # for a CPU the loader changes colours
    if chosen.few:
        batch = replace(batch, targets=batch.targets[:: BOXES // 2])
    if chosen.by_cost:
        heads = [replace(head, scale_x_y=REACH) for head in network.heads]
        step.loss = YoloLoss(heads, options(LossConfig, "loss/yolov3.yaml", **FOR_FEW_LARGE))
    with one_thread_per_operator() if step.imagewise else nullcontext():
        seconds = [seconds_of(make_step, step, batch) for _ in range(WARM_UP + COUNTED)]
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
