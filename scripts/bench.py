"""Seconds per training step on a GPU, or else on the CPU, for variants that compute the same.

    python -m scripts.bench [model] [image size] [batch size] [rounds]
    python -m scripts.bench zoo [image size] [rounds]    # size and speed of each network

Variants take turns, each in a fresh process, because memory settings outlast a variant.
"""

import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from conf import compose, schema
from data import Batch, progress
from models import Darknet, count_flops, count_parameters, for_detection
from models.cfg import ZOO
from train_utils import build, checkpoint, compile, distributed, engine, numerics, sync_batchnorm, train_state

ON_CPU = ("float32", "float32 sync_bn", "bfloat16", "bfloat16 sync_bn")
ON_GPU = ("bfloat16", "bfloat16 fused_norm", "bfloat16 compiled", "float16")
WARM_UP, COUNTED = 3, 6
STEPS_AT_ONCE = 12  # on a GPU, which runs behind its host
CLASSES, BOXES = 80, 20  # classes, and boxes per image: COCO has 7, a mosaic up to four times as many
STEPS = 100_000  # of the pretended training, so that a measurement lies at the start of the warm-up


def new_network(name: str) -> Darknet:
    """A network of the zoo, with the same random weights each time."""
    torch.manual_seed(0)
    network = Darknet(build.load_network(configured(f"model={name}").model), CLASSES)
    network.init_head_biases()
    return network


def configured(*options: str) -> schema.TrainConfig:
    """The default options of train.py, with these overrides."""
    return compose.compose("train", schema.TrainConfig, ["data=shapes", *options])


def synthetic(images: int, side: int, device: torch.device) -> Batch:
    """A batch of noise on the device, with boxes and colour gains, the same each time."""
    torch.manual_seed(0)
    count = images * BOXES
    sizes = torch.rand(count, 2) * 0.4 + 0.02
    centres = sizes / 2 + torch.rand(count, 2) * (1 - sizes)
    owners, classes = torch.arange(count) % images, torch.randint(CLASSES, (count,))
    targets = torch.column_stack((owners, classes, centres * side, sizes * side))
    pixels = torch.randint(256, (images, side, side, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    gains = torch.rand(images, 3) * 0.6 + 0.7
    return Batch(pixels, targets, torch.arange(images), gains=gains).to(device)


def take_turns(measured: Callable[[str], float], names: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """The values of ``measured`` for each name, one per round; progress goes to stderr."""
    results: dict[str, list[float]] = {name: [] for name in names}
    for number in range(1, rounds + 1):
        for name in names:
            print(f"round {number}/{rounds}: {name}", file=sys.stderr, flush=True)
            results[name].append(measured(name))
    return results


def measure(model: str, image_size: int, batch_size: int, variant: str) -> float:
    """Median seconds per step of train.py, from input to update; call it in a fresh process."""
    precision, _, change = variant.partition(" ")
    options = [f"train.{name}={str(name == change).lower()}" for name in ("sync_bn", "fused_norm")]
    config, world = configured(*options), distributed.init_distributed_mode("auto", 600)
    numerics.prepare_numerics(config.train)
    network = new_network(model).to(world.device).to(memory_format=torch.channels_last)
    sync_batchnorm.convert_batch_norm(network, config.train, world, batch_size)
    dtype = None if precision == "float32" else getattr(torch, precision)
    state = train_state.TrainState.create(network, config, STEPS // config.train.epochs, {})
    state.scaler = torch.amp.GradScaler(world.device.type, enabled=dtype is torch.float16)
    loss: Any = build.build_loss(network.heads, config.loss)
    to_input: Any = Batch.network_input
    if change == "compiled":
        loss, to_input = compile.compile_step(network, loss, to_input, "default", 1)
    step = partial(
        engine.train_one_epoch,
        engine.ForwardPass(distributed.wrap_ddp(network, world), loss, to_input, dtype, world),
        state,
        guard=engine.NonFiniteGuard(network, 50, print),
        stop=distributed.StopRequest(),
        writer=checkpoint.CheckpointWriter(Path(), print),
        log_step=lambda step, metrics: None,
        progress=progress.Progress(0, "", enabled=False),
        accumulate=1,
    )
    batch, steps = synthetic(batch_size, image_size, world.device), STEPS_AT_ONCE
    if world.device.type == "cpu":
        batch.gains, steps = batch.gains[:0], 1  # the loader changes colours there
    seconds = [batch_size / step([batch] * steps).images_per_second for _ in range(WARM_UP + COUNTED)]
    return median(seconds[WARM_UP:])


def zoo(side: str = "640", rounds: str = "5") -> None:
    """Print each network's size and the least CPU time of its forward pass, as in predict.py."""
    torch.set_num_threads(1)  # so that the CPU time does not depend on other programs
    cpu, names = torch.device("cpu"), sorted(ZOO)
    size = (int(side), int(side))
    images = torch.rand(1, 3, *size).contiguous(memory_format=torch.channels_last)
    networks = {name: for_detection(new_network(name).eval(), cpu) for name in names}

    @torch.inference_mode()
    def measured(name: str) -> float:
        started = time.thread_time()
        networks[name](images)
        return time.thread_time() - started

    for name, seconds in take_turns(measured, names, int(rounds)).items():
        parameters, flops = count_parameters(networks[name]), count_flops(networks[name], size)
        print(f"| {name} | {parameters:,} | {flops / 1e9:.1f} | {1000 * min(seconds):.0f} |")


def main(model: str = "yolov3-tiny", image_size: str = "320", batch_size: str = "16", rounds: str = "3") -> None:
    """Measure all variants and print their medians and ratios."""
    here = ON_GPU if torch.cuda.is_available() else ON_CPU if numerics.has_native_bfloat16() else ON_CPU[:2]
    measured = partial(measure, model, int(image_size), int(batch_size))
    # A process for each measurement: nothing imported, no memory in use.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        times = take_turns(lambda variant: pool.submit(measured, variant).result(), here, int(rounds))
    print(f"{model}, {image_size} px, batch {batch_size}, {torch.get_num_threads()} threads")
    for name, values in times.items():
        seconds = median(values)
        speed = int(batch_size) / seconds
        print(f"{name:20s} {seconds:7.3f} s/step  {speed:6.1f} images/s  {median(times[here[0]]) / seconds:5.2f}x")


if __name__ == "__main__":
    chosen, given = (zoo, sys.argv[2:]) if sys.argv[1:2] == ["zoo"] else (main, sys.argv[1:])
    print(__doc__) if "--help" in given else chosen(*given)
