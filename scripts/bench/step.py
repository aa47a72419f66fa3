"""Seconds of a training step on this machine's CPU, for the options that change its speed and not its meaning.

    python -m scripts.bench.step [model] [image size] [batch size] [rounds]

Every variant runs in a process of its own, in turn, round after round; the ratios are those of the medians.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time

import torch

from models import Darknet, IouKind, LossConfig, YoloLoss, zoo_cfg
from train_utils.numerics import keep_freed_memory

# name: (bfloat16, channels_last, memory kept between steps)
VARIANTS = {
    "float32": (False, False, False),
    "float32, memory kept": (False, False, True),
    "float32, channels_last, memory kept": (False, True, True),
    "bfloat16, memory kept": (True, False, True),
    "bfloat16, channels_last": (True, True, False),
    "bfloat16, channels_last, memory kept": (True, True, True),
}
WARM_UP, COUNTED = 3, 6


def measure(
    variant: str, model_name: str, image_size: int, batch_size: int, results: multiprocessing.Queue[float]
) -> None:
    """Put the median seconds of a step (forward, loss, backward, update) into ``results``."""
    bfloat16, channels_last, keep = VARIANTS[variant]
    if keep:
        keep_freed_memory()
    torch.manual_seed(0)
    model = Darknet(zoo_cfg(model_name), num_classes=3)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = model.to(memory_format=layout)
    images = torch.rand(batch_size, 3, image_size, image_size).to(memory_format=layout)
    targets = torch.rand(8 * batch_size, 6) * image_size / 2
    targets[:, 0] = torch.arange(8 * batch_size) % batch_size
    targets[:, 1] = torch.arange(8 * batch_size) % 3
    config = LossConfig("yolov3", 3.54, 64.3, 37.4, IouKind.giou, 0.2, 1.0, 1.0, 0.0, 0.0)
    loss = YoloLoss(model.heads, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True)
    seconds = []
    for _ in range(WARM_UP + COUNTED):
        started = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            raw_maps = model(images)
        loss(raw_maps, targets).total.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - started)
    results.put(statistics.median(seconds[WARM_UP:]))


def main(model_name: str = "yolov3-tiny", image_size: str = "320", batch_size: str = "16", rounds: str = "3") -> None:
    """Measure all variants and print their medians and ratios."""
    context = multiprocessing.get_context("spawn")
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(int(rounds)):
        for variant in VARIANTS:
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
