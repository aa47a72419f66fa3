"""What only a GPU can show about training and evaluation, in three calls of at most nine minutes.

    python -m scripts.bench.gpu 1 [--tiny] [gpu.csv]

Call 1 compares with the CPU and measures the step, call 2 what surrounds it, call 3 its variants; a
stage's name runs that stage alone. Each stage is a process with a deadline. Each measurement is
printed and appended to the file at once. With --tiny, which needs no GPU, a stage takes seconds,
nothing is compiled, and the numbers mean nothing. A bare machine needs torch, torchvision,
antlr4-python3-runtime, hotcoco, hydra-core, lazy-loader, matplotlib, msgspec, numpy, omegaconf,
opencv-python-headless, pillow, pycocotools, pytest, pyyaml and rich.
"""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from itertools import islice, product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import cv2
import torch

import data
import models
from conf import train_options
from data.config import ShapesConfig
from data.io import usable_cores
from data.shapes import ensure_shapes
from scripts.bench import step
from train import train
from train_utils import build, detect, distributed, numerics

BF16 = torch.bfloat16
COLUMNS = ("call", "stage", "measurement", "value", "unit", "card", "torch", "date")
COUNT = 3  # batches in an evaluation, and rounds
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Add = Callable[..., None]  # add_row for one stage: takes name, value and unit


class Settings(NamedTuple):
    """What is measured, and for how long; the defaults suit a data-centre GPU."""

    model: str = "yolov3-spp"
    width: float = 1.0
    side: int = 640  # of images, in pixels
    batches: tuple[int, int] = (16, 64)  # images per step
    steps: int = 12  # measured, after as many to warm up
    small: int = 416  # side of the images in a step that the host may limit
    drawn: tuple[int, int, int] = (256, 555, 32)  # images on disk, their side (as COCO's), and entries for each
    epochs: int = 5
    workers: int = 15  # loader processes
    matrix: int = 8192  # side of the square matrices whose product gives the peak


TINY = Settings("yolov3-tiny", 0.125, 64, (2, 4), 1, 32, (12, 96, 4), 2, 1, 128)


def add_row(path: Path, stage: tuple[int, str], name: str, value: float | str, unit: str = "") -> None:
    """Print a measurement of a call's stage and append its row."""
    text = value if isinstance(value, str) else f"{value:.4g}"
    print(f"{name:62s} {text} {unit}", flush=True)
    card = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    row = (*stage, name, text, unit, card, torch.__version__, time.strftime("%Y-%m-%d %H:%M"))
    with path.open("a", newline="") as file:
        csv.writer(file).writerows([row] if file.tell() else [COLUMNS, row])


def seconds_each(count: int, run: Callable[..., object], *arguments: object) -> float:
    """Mean seconds of ``run(*arguments)``, after as many calls to warm up."""
    for _ in range(2):  # the second round counts
        started = time.perf_counter()
        for _ in range(count):
            run(*arguments)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize(DEVICE)
    return (time.perf_counter() - started) / count


@cache
def peak(side: int) -> float:
    """Operations per second in the product of two square bfloat16 matrices."""
    left, right = (torch.randn(side, side, device=DEVICE, dtype=BF16) for _ in range(2))
    return 2 * side**3 / seconds_each(20, torch.matmul, left, right)


class Step:
    """The default step of train.py on a synthetic batch in the memory format of the weights."""

    def __init__(self, settings: Settings, images: int, mode: str = "off", half: Any = BF16):
        numerics.prepare_numerics(step.configured().train)
        model = step.new_network(settings.model, settings.width).to(DEVICE).to(memory_format=torch.channels_last)
        self.settings, self.images, self.batch = settings, images, step.synthetic(images, settings.side, DEVICE)
        self.batch.images = self.batch.images.contiguous(memory_format=torch.channels_last)
        self.operations = 3 * models.count_flops(model, (settings.side, settings.side))  # for an image
        self.run = step.new_step(model, distributed.init_distributed_mode(DEVICE.type, 600), half, mode)

    def speed(self, steps: int) -> float:
        """Images per second in this many consecutive steps."""
        return self.run([self.batch] * steps).images_per_second

    def add(self, add: Add, name: str) -> None:
        """Add the time of the first step, then speed and memory."""
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        add(f"{name}: first step", self.images / self.speed(1), "s")
        _, speed = (self.speed(self.settings.steps) for _ in range(2))
        add(name, speed, "images/s")
        add(f"{name}: of the peak", 100 * self.operations * speed / peak(self.settings.matrix), "%")
        add(f"{name}: memory at most", torch.cuda.max_memory_allocated() / 2**30, "GiB")

    def add_inside(self, add: Add, name: str) -> None:
        """Add the kernels and waits of a step, and the share of time in which the GPU works."""
        with torch.profiler.profile() as profiler:
            self.speed(COUNT)
        events = [event for event in profiler.events() or () if event.device_type.name == "CUDA"]
        kernels = [event.time_range.elapsed_us() for event in events if not event.is_user_annotation]
        add(f"{name}: kernels and copies in a step", len(kernels) / COUNT)
        busy = sum(kernels) / 1e4 / COUNT / self.images * self.speed(self.settings.steps)
        add(f"{name}: time in which the GPU works", busy, "%")
        if DEVICE.type == "cuda":
            counts = []
            torch.cuda.set_sync_debug_mode("warn")
            for steps in (1, 1 + COUNT):  # both end an epoch, which waits, too
                with warnings.catch_warnings(record=True, action="always") as caught:
                    self.speed(steps)
                counts.append(sum("synchronizing" in str(warning.message) for warning in caught))
            torch.cuda.set_sync_debug_mode("default")
            add(f"{name}: waits in a step", (counts[1] - counts[0]) / COUNT)
            print(profiler.key_averages().table("self_device_time_total", row_limit=12, max_name_column_width=60))


def add_in_turns(add: Add, steps: dict[str, Step]) -> None:
    """Add each step alone, then medians of COUNT rounds in turn and their ratio to the first."""
    for name, one in steps.items():
        one.add(add, name)
    speeds = step.take_turns(lambda name: steps[name].speed(steps[name].settings.steps), [*steps], COUNT)
    medians = {name: median(values) for name, values in speeds.items()}
    for name, speed in medians.items():
        add(f"{name}, in turns", speed, "images/s")
        add(f"{name}, against {next(iter(steps))}", speed / next(iter(medians.values())), "times")


def machine(settings: Settings, add: Add) -> None:
    """Versions, and the peak speed of arithmetic and memory."""
    fast = train_options.is_installed("simplejpeg")
    add("versions", f"CUDA {torch.version.cuda}, OpenCV {cv2.__version__}{', simplejpeg' * fast}")
    add("cores", len(usable_cores()))
    add("bfloat16 matrix product", peak(settings.matrix) / 1e12, "TFLOP/s")
    source, target = torch.empty(2, 4 * settings.matrix**2, device=DEVICE)
    seconds = seconds_each(20, target.copy_, source)
    add("copy, bytes read and written", 2 * source.nbytes / seconds / 1e9, "GB/s")


def correct(settings: Settings, add: Add) -> None:
    """Raw maps and gradients (batch norm in eval mode) in float32 against float64 on the CPU."""
    numerics.allow_tf32(False)
    options, results = step.configured().loss, []
    exact, here = (step.new_network(settings.model, 0.25).eval() for _ in range(2))
    exact, here = exact.double(), here.to(DEVICE).to(memory_format=torch.channels_last)
    batch = step.synthetic(4, settings.side // 4 // 32 * 32 or 64, DEVICE)
    for model, device, dtype in ((exact, torch.device("cpu"), torch.float64), (here, DEVICE, torch.float32)):
        maps, loss = model(batch.to(device).network_input().to(dtype)), build.build_loss(model.heads, options)
        exchange: dict[str, Any] = {"sum_over_ranks": distributed.sum_over_ranks, "world_size": 1}
        loss(maps, batch.targets.to(device), objectness_ratio=1.0, **exchange).total.backward()
        results.append((maps, [parameter.grad for parameter in model.parameters()]))
    for name, expected, ours in zip(("maps", "gradients"), *results, strict=True):
        pairs = [(one.detach(), other.detach().cpu().double()) for one, other in zip(expected, ours, strict=True)]
        worst = max((one - other).abs().max() / one.abs().max().clamp(min=1e-12) for one, other in pairs)
        add(f"float32 {name} against float64 on the CPU", float(worst))


def tests(settings: Settings, add: Add) -> None:
    """The outcome of each test marked gpu."""
    files = [str(path) for path in Path("tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    options = "-m pytest -v -o addopts=--import-mode=importlib --continue-on-collection-errors -m gpu".split()
    with subprocess.Popen([sys.executable, *options, *files], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if found := re.match(r"(tests/.+?) (PASSED|FAILED|SKIPPED|ERROR)", line):
                add(found[1], found[2])
    add("exit code of pytest", process.returncode)


def steps(settings: Settings, add: Add, mode: str) -> None:
    """The default step, eager or compiled; the larger batch also with the profiler."""
    for images in settings.batches[mode != "off" :]:
        one, name = Step(settings, images, mode), f"train.compile={mode}, batch {images}"
        one.add(add, name)
    one.add_inside(add, name)


def evaluation(settings: Settings, add: Add) -> None:
    """NMS alone, with few or many boxes, and evaluation without and with it."""
    images = settings.batches[-1]
    synthetic = [step.synthetic(images, settings.side, DEVICE)] * COUNT
    detector = models.for_detection(step.new_network(settings.model, settings.width).to(DEVICE).eval(), DEVICE)
    suppression = models.Postprocess(detector.heads, 0.001, nms_iou=0.6, max_detections=300, multi_label=True)
    with torch.inference_mode():
        drawn = detector(synthetic[0].network_input())

    def evaluate(raw_maps: list[torch.Tensor], dtype: torch.dtype | None) -> None:
        after = (lambda _: suppression(raw_maps)) if raw_maps else lambda _: []
        list(detect.detect_batches(detector, synthetic, after, DEVICE, dtype=dtype))

    for name, mean in (("forward pass alone", None), ("few boxes, as trained", -9.0), ("many boxes, as early", -2.0)):
        raw_maps = [torch.randn_like(raw) + mean for raw in drawn if mean is not None]
        for dtype in (None, BF16):
            seconds = seconds_each(1, evaluate, raw_maps, dtype)
            add(f"evaluation, {dtype or 'float32'}: {name}", COUNT * images / seconds, "images/s")
        if raw_maps:
            seconds = seconds_each(COUNT, suppression, raw_maps)
            add(f"decoding and suppression: {name}", 1000 * seconds / images, "ms/image")


def drawn_set(settings: Settings, folder: str) -> list[str]:
    """Options of a training on drawn images. Each is listed many times and decoded each time."""
    (count, side, entries), images = settings.drawn, settings.batches[-1]
    root = ensure_shapes(Path(folder), ShapesConfig(count, images, side))
    path = root / "annotations" / "instances_train.json"
    content = json.loads(path.read_text())
    for part, keys in (("images", {"id"}), ("annotations", {"id", "image_id"})):
        pairs = product(range(entries), content[part])
        content[part] = [entry | {key: entry[key] + 10**6 * number for key in keys} for number, entry in pairs]
    path.write_text(json.dumps(content))
    of_data = ["data.format=coco", f"data.root={root}", f"data.index_dir={folder}", f"data.workers={settings.workers}"]
    of_model = [f"model={settings.model}", f"model.width={settings.width}"]
    return [*of_data, *of_model, f"train.image_size={settings.side}", f"train.batch_size={images}"]


def loader(settings: Settings, add: Add) -> None:
    """The step on synthetic input, the step fed by workers, and the workers alone."""
    cv2.setNumThreads(0)
    one = Step(settings, settings.batches[-1])
    one.add(add, "step on synthetic input")
    world, name = distributed.init_distributed_mode(DEVICE.type, 600), f"{settings.workers} workers"
    with tempfile.TemporaryDirectory() as folder:
        options = step.configured(*drawn_set(settings, folder), "augment.colour=device")
        train_set = data.open_annotations(options.data, "train")
        sampler = data.TrainBatchSampler(build.build_sampler(options, train_set, 32, world))
        dataset = build.build_dataset(options, train_set, build.open_images(train_set, options.data, world))
        loaded = data.make_loader(dataset, sampler, settings.workers, DEVICE, batch_bytes=sampler.batch_bytes)
        first, then, iterator = (loaded.prefetch_factor or 0) * settings.workers, 2 * settings.steps, iter(loaded)
        _, result = (one.run(islice(iterator, number)) for number in (first, then))
        add(f"step fed by {name}", result.images_per_second, "images/s")
        add(f"step fed by {name}: waiting", 100 * result.waiting, "%")
        for number in (first, then):  # the first round uses up what the workers had ready
            started = time.perf_counter()
            images = sum(len(batch.images) for batch in islice(iterator, number))
        add(f"{name} alone", images / (time.perf_counter() - started), "images/s")


def training(settings: Settings, add: Add) -> None:
    """Epochs of train.py with its defaults."""
    with tempfile.TemporaryDirectory() as folder:
        options = [f"run_dir={folder}/run", f"train.epochs={settings.epochs}", "augment.close_mosaic_epochs=0"]
        outcome = train(["data=shapes", *drawn_set(settings, folder), *options, "evaluate.every=0"])
        for row in csv.DictReader(Path(folder, "run", "times.csv").read_text().splitlines()):
            add(f"training, epoch {row['epoch']}", float(row["images_per_second"]), "images/s")
            add(f"training, epoch {row['epoch']}: waiting", 100 * float(row["waiting"]), "%")
        add("training: AP", outcome["AP"])


def numbers(settings: Settings, add: Add) -> None:
    """The step in both 16-bit formats."""
    formats = {"bfloat16": BF16, "float16": torch.float16}
    add_in_turns(add, {name: Step(settings, settings.batches[-1], half=half) for name, half in formats.items()})


def graphs(settings: Settings, add: Add) -> None:
    """A step that the host may limit: eager, compiled and in CUDA graphs."""
    small = settings._replace(model="yolov3-tiny", side=settings.small)
    add_in_turns(add, {mode: Step(small, small.batches[0], mode) for mode in ("off", "default", "reduce-overhead")})


# Call, stage and deadline in seconds, most useful first; those of a call add up to 525 at most.
STAGES: dict[str, tuple[int, Callable[[Settings, Add], None], int]] = {
    "machine": (1, machine, 35), "correct": (1, correct, 50), "eager": (1, partial(steps, mode="off"), 105),
    "compiled": (1, partial(steps, mode="default"), 225), "tests": (1, tests, 110),
    "evaluation": (2, evaluation, 110), "loader": (2, loader, 115), "training": (2, training, 240),
    "numbers": (3, numbers, 100), "graphs": (3, graphs, 105),
    "autotune": (3, partial(steps, mode="max-autotune-no-cudagraphs"), 220),
}  # fmt: skip


def main(*arguments: str) -> None:
    """Run each stage in a process of its own; with --inside, in this one."""
    path = next((argument for argument in arguments if argument.endswith(".csv")), "gpu.csv")
    chosen = {name: stage for name, stage in STAGES.items() if {name, str(stage[0])} & {*arguments}}
    if not chosen:
        sys.exit(__doc__)
    for name, (call, stage, seconds) in chosen.items():
        add, tiny = partial(add_row, Path(path), (call, name)), {"--tiny"} & {*arguments}
        if "--inside" in arguments:
            torch.compiler.set_stance("force_eager" if tiny else "default")
            stage(TINY if tiny else Settings(), add)
            continue
        print(f"{name}:", flush=True)
        command = [sys.executable, "-m", "scripts.bench.gpu", "--inside", name, path, *tiny]
        with subprocess.Popen(command, start_new_session=True) as process:
            try:
                if code := process.wait(seconds):
                    add("FAILED", f"exit code {code}")
            except subprocess.TimeoutExpired:
                add("FAILED", f"killed after {seconds} s")
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with its children


if __name__ == "__main__":
    main(*sys.argv[1:])
