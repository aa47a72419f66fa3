"""Seconds of a training step on this machine's CPU, for variants of the same meaning.

    python -m scripts.bench.step [model] [image size] [batch size] [rounds]

Each variant runs in a fresh process, since memory settings last, and all take turns.
"""

import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from conf.entry import compose
from conf.network import build_loss
from conf.schema import TrainConfig
from data import Batch
from models import Darknet, zoo_cfg
from train_utils.checkpoint import CheckpointWriter
from train_utils.compiled import compile_step
from train_utils.distributed import World, init_distributed_mode, wrap_ddp
from train_utils.engine import ForwardPass, NonFiniteGuard, train_one_epoch
from train_utils.numerics import has_native_bfloat16, keep_freed_memory
from train_utils.optim import Schedule, WeightAverage, make_optimizer
from train_utils.progress import Progress
from train_utils.stop import StopRequest
from train_utils.sync_batchnorm import convert_sync_batchnorm
from train_utils.train_state import TrainState

VARIANTS = ("float32", "float32 sync_bn", "bfloat16", "bfloat16 sync_bn")
WARM_UP, COUNTED = 3, 6
CLASSES, BOXES = 80, 20  # of the network, and of an image: COCO has 7, a mosaic up to four times as many
STEPS = 100_000  # of the whole training: a measurement lies at the start of the burn-in


def new_network(name: str, width: float = 1.0) -> Darknet:
    """A network of the zoo, with the same random weights each time."""
    torch.manual_seed(0)
    network = Darknet(zoo_cfg(name), CLASSES, width)
    network.init_head_biases()
    return network


def new_step(
    network: Darknet, world: World, dtype: torch.dtype | None, compiled: str = "off"
) -> Callable[[Batch], object]:
    """A step on a batch as train.py makes it by default: input, forward, loss, backward, update.

    ``network`` is on its device; ``dtype`` is autocast's, and ``compiled`` train.compile.
    """
    config = compose("train", TrainConfig, ["data=shapes"])
    network = network.to(memory_format=torch.channels_last).train()
    schedule = Schedule(config.optim, STEPS // 100, STEPS)
    scaler = torch.amp.GradScaler(world.device.type, enabled=dtype is torch.float16)
    state = TrainState(network, WeightAverage(network, schedule), make_optimizer(network, config.optim), scaler, {})
    loss, to_input = compile_step(network, build_loss(network.heads, config.loss), Batch.network_input, compiled, 1)
    step = partial(
        train_one_epoch,
        ForwardPass(wrap_ddp(network, world), loss, to_input, dtype, world),
        state=state,
        guard=NonFiniteGuard(network, 50, print),
        stop=StopRequest(),
        writer=CheckpointWriter(Path(), print),
        log_step=lambda step, figures: None,
        progress=Progress(0, "", enabled=False),
        accumulate=1,
    )
    return lambda batch: step([batch])


def synthetic(images: int, side: int, device: torch.device) -> Batch:
    """A batch of noise that lies on the device already, with boxes and colour gains."""
    count, generator = images * BOXES, torch.Generator().manual_seed(0)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    sizes = uniform(count, 2) * 0.4 + 0.02
    centres = sizes / 2 + uniform(count, 2) * (1 - sizes)
    numbers = torch.stack((torch.arange(count) % images, (uniform(count) * CLASSES).floor()), dim=1)
    batch = Batch(
        images=torch.randint(256, (images, side, side, 3), generator=generator, dtype=torch.uint8).permute(0, 3, 1, 2),
        targets=torch.cat((numbers, centres * side, sizes * side), dim=1).float(),
        indices=torch.arange(images),
        letterboxes=torch.empty((0, 4), dtype=torch.float64),
        gains=uniform(images, 3) * 0.6 + 0.7,
    )
    return batch.to(device)


def take_turns(contenders: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """What each contender returned in each round, by name; progress goes to stderr."""
    results: dict[str, list[Any]] = {name: [] for name in contenders}
    for number in range(1, rounds + 1):
        for name, run in contenders.items():
            print(f"round {number}/{rounds}: {name}", file=sys.stderr, flush=True)
            results[name].append(run())
    return results


def measure(variant: str, model: str, image_size: int, batch_size: int) -> float:
    """Median seconds of a step in a process of its own."""
    keep_freed_memory()
    network, world = new_network(model), init_distributed_mode("cpu", 60)
    if "sync_bn" in variant:
        convert_sync_batchnorm(network, world)
    step = new_step(network, world, torch.bfloat16 if "bfloat16" in variant else None)
    batch = synthetic(batch_size, image_size, world.device)
    batch = replace(batch, gains=batch.gains[:0])  # for a CPU the loader changes colours
    seconds = []
    for _ in range(WARM_UP + COUNTED):
        started = time.perf_counter()
        step(batch)
        seconds.append(time.perf_counter() - started)
    return median(seconds[WARM_UP:])


def in_fresh_process(*arguments: Any) -> float:
    """What ``measure`` returns in a process with nothing imported and no memory in use."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *arguments).result()


def main(model: str = "yolov3-tiny", image_size: str = "320", batch_size: str = "16", rounds: str = "3") -> None:
    """Measure all variants and print their medians and ratios."""
    native = has_native_bfloat16(torch.device("cpu"))
    here = [name for name in VARIANTS if native or "bfloat16" not in name]
    runs = {name: partial(in_fresh_process, name, model, int(image_size), int(batch_size)) for name in here}
    seconds = {name: median(values) for name, values in take_turns(runs, int(rounds)).items()}
    print(f"{model}, {image_size} px, batch {batch_size}, {torch.get_num_threads()} threads")
    for name, value in seconds.items():
        print(f"{name:20s} {value:7.3f} s/step  {seconds['float32'] / value:5.2f}x")


if __name__ == "__main__":
    main(*sys.argv[1:])
