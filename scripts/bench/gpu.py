"""What a CPU cannot show about training and evaluating on a GPU, in less than ten minutes.

    python -m scripts.bench.gpu [--tiny] [stage ...]

Each stage is a process with a deadline and prints its figures as it goes. --tiny takes seconds a
stage, needs no GPU, and its figures mean nothing. The packages that a bare machine with torch may
lack: hydra-core, omegaconf, hotcoco, lazy-loader.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

import cv2
import torch

import data
import models
from conf import build
from data.loader import PREFETCHED_BATCHES
from scripts.bench import step
from scripts.bench.data import RepeatedSource, repeated
from train_utils import detect, distributed, numerics

COUNT = 3  # batches of an evaluation
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Settings(NamedTuple):
    """What is measured, and how long; by default on a data-centre GPU."""

    model: str = "yolov3-spp"
    width: float = 1.0
    side: int = 640  # of images, in pixels
    batches: tuple[int, int] = (16, 64)  # images in a step
    steps: int = 12  # counted ones, after as many that warm up
    drawn: tuple[int, int] = (256, 555)  # images on disk for the loader, and their side: as many pixels as COCO's
    workers: int = 15  # of the loader
    matrix: int = 8192  # side of the matrices whose product shows the peak


TINY = Settings("yolov3-tiny", 0.25, 64, (2, 4), 1, (12, 96), 1, 128)


def show(figure: str, value: float | str, unit: str = "") -> None:
    """Print a figure."""
    print(f"{figure:58s} {value if isinstance(value, str) else f'{value:.4g}'} {unit}", flush=True)


def wait() -> None:
    """Wait until the device has done all that it was given."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize(DEVICE)


def seconds_each(count: int, run: Callable[..., object], *arguments: object) -> float:
    """Mean seconds of ``run(*arguments)``, after a warm-up."""
    for _ in range(2):  # the second time counts
        started = time.perf_counter()
        for _ in range(count):
            run(*arguments)
        wait()
    return (time.perf_counter() - started) / count


def new_step(settings: Settings, compiled: str = "off") -> Callable[[data.Batch], object]:
    """The default step in bfloat16, on the device."""
    numerics.keep_freed_memory()
    numerics.allow_tf32(False)
    torch.backends.cudnn.benchmark = True
    model = step.new_network(settings.model, settings.width).to(DEVICE)
    return step.new_step(model, distributed.init_distributed_mode(DEVICE.type, 600), torch.bfloat16, compiled)


def machine(settings: Settings) -> None:
    """Names, versions and the peak of arithmetic."""
    show("device", torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU")
    show("versions", f"torch {torch.__version__}, OpenCV {cv2.__version__}, {time.strftime('%Y-%m-%d')}")
    left, right = (torch.randn(2 * [settings.matrix], device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    seconds = seconds_each(settings.steps, torch.matmul, left, right)
    show("bfloat16 matrix product", 2 * settings.matrix**3 / seconds / 1e12, "TFLOP/s")


def correct(settings: Settings) -> None:
    """Maps, and gradients with fixed statistics, in float32 against those of float64 on the CPU."""
    numerics.allow_tf32(False)
    config = step.configured()
    exact, here = (step.new_network(settings.model, 0.25).eval() for _ in range(2))
    exact, here = exact.double(), here.to(DEVICE).to(memory_format=torch.channels_last)
    batch, results = step.synthetic(4, settings.side // 4 // 32 * 32 or 64, DEVICE), []
    for model, device, dtype in ((exact, torch.device("cpu"), torch.float64), (here, DEVICE, torch.float32)):
        maps, loss = model(batch.to(device).network_input().to(dtype)), build.build_loss(model.heads, config.loss)
        targets = batch.targets.to(device)
        parts = loss(maps, targets, objectness_ratio=1.0, sum_over_ranks=distributed.sum_over_ranks, world_size=1)
        parts.total.backward()
        results.append((maps, [parameter.grad for parameter in model.parameters()]))
    for name, expected, ours in zip(("maps", "gradients"), *results, strict=True):
        worst = max(_relative(one, other) for one, other in zip(expected, ours, strict=True))
        show(f"float32 {name} against float64 on the CPU", worst)


def _relative(expected: torch.Tensor, ours: torch.Tensor) -> float:
    difference = ours.detach().cpu().double() - expected.detach()
    return float(difference.abs().max() / expected.detach().abs().max().clamp(min=1e-12))


def steps(settings: Settings) -> None:
    """Speed, memory and waits of the default step, eager and compiled."""
    few, many = settings.batches
    for compiled, images in (("off", few), ("off", many), ("default", many)):
        run, batch = new_step(settings, compiled), step.synthetic(images, settings.side, DEVICE)
        started = time.perf_counter()
        run(batch)
        name = f"train.compile={compiled}, batch {images}"
        show(f"{name}: first step", time.perf_counter() - started, "s")
        show(name, images / seconds_each(settings.steps, run, batch), "images/s")
        if DEVICE.type == "cuda":
            show(f"{name}: peak of memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")
        with torch.profiler.profile() as profiler:
            run(batch)
        waits = sum(event.count for event in profiler.key_averages() if event.key == "aten::_local_scalar_dense")
        show(f"{name}: waits for the device in a step", waits)


def evaluation(settings: Settings) -> None:
    """Images a second of the forward pass alone, and with the suppression of many or few boxes."""
    images = settings.batches[-1]
    synthetic = [step.synthetic(images, settings.side, DEVICE)] * COUNT
    detector = models.for_detection(step.new_network(settings.model, settings.width).to(DEVICE).eval(), DEVICE)
    suppress = models.Postprocess(detector.heads, confidence=0.001, nms_iou=0.6, max_detections=300, multi_label=True)
    with torch.inference_mode():
        shapes = [raw.shape for raw in detector(synthetic[0].network_input())]

    def evaluate(maps: list[torch.Tensor] | None, dtype: torch.dtype | None) -> None:
        after = (lambda _: suppress(maps)) if maps else lambda _: []
        for _ in detect.detect_batches(detector, synthetic, after, DEVICE, dtype=dtype):
            pass

    for name, dtype in (("float32", None), ("bfloat16", torch.bfloat16)):
        forward = seconds_each(1, evaluate, None, dtype)
        show(f"{name}: forward pass alone", COUNT * images / forward, "images/s")
        for when, logit in (("trained", -9.0), ("early", -2.0)):  # the mean of each logit
            generator = torch.Generator().manual_seed(0)
            maps = [(torch.randn(shape, generator=generator) + logit).to(DEVICE) for shape in shapes]
            seconds = seconds_each(1, evaluate, maps, dtype)
            show(f"{name}: evaluation, maps {when}", COUNT * images / seconds, "images/s")


def loader(settings: Settings) -> None:
    """Images a second of a step on synthetic input, and fed by workers."""
    cv2.setNumThreads(0)
    run, images = new_step(settings), settings.batches[-1]
    seconds = seconds_each(settings.steps, run, step.synthetic(images, settings.side, DEVICE))
    show("step on synthetic input", images / seconds, "images/s")
    with tempfile.TemporaryDirectory() as folder:
        count, side = settings.drawn
        shapes = f"data.shapes={{train_images: {count}, val_images: 1, image_size: {side}}}"
        options = [shapes, f"data.root={folder}/set", f"data.index_dir={folder}/index", "augment=mosaic"]
        options += [f"train.image_size={settings.side}", f"train.batch_size={images}", "augment.colour=device"]
        config = step.configured(*options)
        listed = data.open_annotations(config.data, "train")
        annotations = repeated(listed)  # so that a batch hardly has an image twice
        sampler = build.build_sampler(config, annotations, 32, distributed.init_distributed_mode(DEVICE.type, 600))
        dataset = build.build_dataset(config, annotations, RepeatedSource(listed, config.data.on_error))
        loaded = iter(data.make_loader(dataset, sampler, settings.workers, DEVICE))
        for number in (PREFETCHED_BATCHES * settings.workers, 2 * settings.steps):  # the second time counts
            started = time.perf_counter()
            for _ in range(number):
                run(next(loaded))
            wait()
        speed = number * images / (time.perf_counter() - started)
        show(f"step fed by {settings.workers} workers", speed, "images/s")


# Deadlines in seconds, in the order of worth.
STAGES = {
    "machine": (machine, 45), "correct": (correct, 60), "steps": (steps, 230), "evaluation": (evaluation, 80),
    "loader": (loader, 100),
}  # fmt: skip


def main(*arguments: str) -> None:
    """Run each stage in a process of its own; with --inside, in this one."""
    flags = {argument for argument in arguments if argument.startswith("--")}
    for name in [argument for argument in arguments if argument not in flags] or STAGES:
        stage, seconds = STAGES[name]
        if "--inside" in flags:
            stage(TINY if "--tiny" in flags else Settings())
            continue
        print(f"{name}:", flush=True)
        try:
            command = [sys.executable, "-m", "scripts.bench.gpu", "--inside", name, *flags]
            subprocess.run(command, timeout=seconds, check=True)
        except subprocess.SubprocessError as error:
            print(f"FAILED: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
