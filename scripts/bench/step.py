"""Seconds of a training step on this machine's CPU, for variants of the same meaning.

    python -m scripts.bench.step [model] [image size] [batch size] [rounds]

Each variant runs in a fresh process, since memory settings last.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from functools import partial

import torch

from scripts.bench.common import make_step, new_network, settings_of, step_of, synthetic
from scripts.bench.rounds import in_fresh_process, medians, seconds_of, take_turns
from train_utils.distributed import init_distributed_mode
from train_utils.numerics import has_native_bfloat16, keep_freed_memory
from train_utils.sync_batchnorm import convert_sync_batchnorm

VARIANTS = ("float32", "float32 sync_bn", "bfloat16", "bfloat16 sync_bn")
WARM_UP, COUNTED = 3, 6


def measure(variant: str, model_name: str, image_size: int, batch_size: int) -> float:
    """Median seconds of a step as training makes it: input, forward, loss, backward, update."""
    keep_freed_memory()
    cpu, world = torch.device("cpu"), init_distributed_mode("cpu", 60)
    settings = replace(settings_of(tiny=True), device=cpu, model=model_name, width=1.0, side=image_size)
    network = new_network(settings).to(memory_format=torch.channels_last).train()
    if "sync_bn" in variant:
        convert_sync_batchnorm(network, world)
    step = step_of(network, world, torch.bfloat16 if "bfloat16" in variant else None)
    batch = synthetic(settings, batch_size)
    batch = replace(batch, gains=batch.gains[:0])  # for a CPU the loader changes colours
    seconds = [seconds_of(make_step, step, batch) for _ in range(WARM_UP + COUNTED)]
    return statistics.median(seconds[WARM_UP:])


def main(model_name: str = "yolov3-tiny", image_size: str = "320", batch_size: str = "16", rounds: str = "3") -> None:
    """Measure all variants and print their medians and ratios."""
    size, batch, native = int(image_size), int(batch_size), has_native_bfloat16(torch.device("cpu"))
    here = [name for name in VARIANTS if native or "bfloat16" not in name]
    runs = {name: partial(in_fresh_process, measure, name, model_name, size, batch) for name in here}
    seconds = medians(take_turns(runs, int(rounds)))
    print(f"{model_name}, {size} px, batch {batch}, {torch.get_num_threads()} threads")
    for name, value in seconds.items():
        print(f"{name:20s} {value:7.3f} s/step  {seconds['float32'] / value:5.2f}x")


if __name__ == "__main__":
    main(*sys.argv[1:])
