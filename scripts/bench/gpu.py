"""What only a GPU can show, most useful first.

    python -m scripts.bench.gpu [stage ...] [--tiny] [gpu.csv]

Wheels to carry to a machine that has torch alone: antlr4-python3-runtime 4.9.3 (by `pip wheel`),
hotcoco, hydra-core, lazy-loader, matplotlib, msgspec, numpy, omegaconf, opencv-python-headless,
pillow, platformdirs, pooch, pycocotools, pyyaml, rich, simplejpeg and torchvision.

Stages are eager, fused, compiled, float16 and suppression. Each measurement is printed and appended
to the file at once. With --tiny, which needs no GPU, nothing is compiled, and the numbers mean
nothing.
"""

import csv
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.benchmark import Timer

import models
from scripts.bench import step
from train_utils import distributed, numerics, sync_batchnorm

BF16 = torch.bfloat16
COLUMNS = ("stage", "measurement", "value", "unit", "card", "torch", "date")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Add = Callable[..., None]  # add_row for one stage: takes name, value and unit


class Settings(NamedTuple):
    """What is measured, and for how long; the defaults suit a data-centre GPU."""

    model: str = "yolov3-spp"
    width: float = 1.0
    side: int = 640  # of images, in pixels
    batches: tuple[int, int] = (16, 64)  # images per step
    steps: int = 12  # measured, after as many to warm up
    matrix: int = 8192  # side of the square matrices whose product gives the peak


TINY = Settings("yolov3-tiny", 0.125, 64, (2, 4), 1, 128)


def add_row(path: Path, stage: str, name: str, value: float, unit: str) -> None:
    """Print a measurement of a stage and append its row."""
    print(f"{name:62s} {value:.4g} {unit}", flush=True)
    card = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    row = (stage, name, f"{value:.4g}", unit, card, torch.__version__, time.strftime("%Y-%m-%d %H:%M"))
    with path.open("a", newline="") as file:
        csv.writer(file).writerows([row] if file.tell() else [COLUMNS, row])


@cache
def peak(side: int) -> float:
    """Operations per second in the product of two square bfloat16 matrices."""
    matrix = torch.randn(side, side, device=DEVICE, dtype=BF16)
    return 2 * side**3 / Timer("matrix @ matrix", globals={"matrix": matrix}).timeit(20).mean


def steps(settings: Settings, add: Add, *, mode: str = "off", half: torch.dtype = BF16, fused: bool = False) -> None:
    """The default step on synthetic batches."""
    config = step.configured(f"train.fused_norm={str(fused).lower()}").train
    numerics.prepare_numerics(config)
    world = distributed.init_distributed_mode(DEVICE.type, 600)
    for images in settings.batches[mode != "off" or half != BF16 :]:
        model = step.new_network(settings.model, settings.width).to(DEVICE).to(memory_format=torch.channels_last)
        operations = 3 * models.count_flops(model, (settings.side, settings.side))  # for an image
        batch = step.synthetic(images, settings.side, DEVICE)
        batch.images = batch.images.contiguous(memory_format=torch.channels_last)
        if fused and DEVICE.type == "cuda":  # its kernels do not run on a CPU
            sync_batchnorm.convert_batch_norm(model, config, world, images)
        run = step.new_step(model, world, half, mode)
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        form = "train.fused_norm" if fused else f"train.compile={mode}"
        name = f"{half}, {form}, batch {images}".removeprefix("torch.")
        add(f"{name}: first step", images / run([batch]).images_per_second, "s")
        run([batch] * settings.steps)  # to warm up
        speed = run([batch] * settings.steps).images_per_second
        add(name, speed, "images/s")
        add(f"{name}: of the peak", 100 * operations * speed / peak(settings.matrix), "%")
        add("bfloat16 matrix product", peak(settings.matrix) / 1e12, "TFLOP/s")
        add(f"{name}: memory at most", torch.cuda.max_memory_allocated() / 2**30, "GiB")


def suppression(settings: Settings, add: Add) -> None:
    """Decoding and suppression with few or many boxes."""
    images = settings.batches[-1]
    network = step.new_network(settings.model, settings.width).to(DEVICE).eval()
    detector = models.for_detection(network, DEVICE)
    postprocess = models.Postprocess(detector.heads, 0.001, nms_iou=0.6, max_detections=300, multi_label=True)
    with torch.inference_mode():
        drawn = detector(step.synthetic(images, settings.side, DEVICE).network_input())
    for name, mean in (("few boxes, as trained", -9.0), ("many boxes, as early", -2.0)):
        maps = [torch.randn_like(raw) + mean for raw in drawn]
        run = Timer("postprocess(maps)", globals={"postprocess": postprocess, "maps": maps})
        add(f"decoding and suppression: {name}", 1000 * run.timeit(3).mean / images, "ms/image")


STAGES: dict[str, Callable[..., None]] = {  # most useful first
    "eager": steps,
    "fused": partial(steps, fused=True),
    "compiled": partial(steps, mode="default"),
    "float16": partial(steps, half=torch.float16),
    "suppression": suppression,
}


def main(*arguments: str) -> None:
    """Run the stages, or those named."""
    path = next((argument for argument in arguments if argument.endswith(".csv")), "gpu.csv")
    is_tiny = "--tiny" in arguments
    if DEVICE.type == "cpu" and not is_tiny:
        raise SystemExit("error: there is no GPU. fix: --tiny")
    torch.compiler.set_stance("force_eager" if is_tiny else "default")
    for name in [name for name in STAGES if name in arguments] or STAGES:
        print(f"{name}:", flush=True)
        STAGES[name](TINY if is_tiny else Settings(), partial(add_row, Path(path), name))


if __name__ == "__main__":
    print(__doc__) if "--help" in sys.argv else main(*sys.argv[1:])
