"""What only a GPU can show, in two calls of at most six minutes each, most useful first.

    python -m scripts.bench.gpu 1 [--tiny] [gpu.csv]

Wheels to carry to a machine that has torch alone: antlr4-python3-runtime 4.9.3 (by `pip wheel`),
hotcoco, hydra-core, lazy-loader, matplotlib, msgspec, numpy, omegaconf, opencv-python-headless,
pillow, platformdirs, pooch, pycocotools, pyyaml, rich, simplejpeg and torchvision.

A stage's name runs that stage alone. Each stage is a process with a deadline, and the last one of a
call has what the others left. Each measurement is printed and appended to the file at once. With
--tiny, which needs no GPU, nothing is compiled, and the numbers mean nothing.
"""

import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

import models
from data.config import ShapesConfig
from data.shapes import ensure_shapes
from scripts.bench import step
from train import train
from train_utils import distributed, numerics, sync_batchnorm

BF16 = torch.bfloat16
COLUMNS = ("call", "stage", "measurement", "value", "unit", "card", "torch", "date")
COUNT = 3  # repetitions of what varies little
CALL_SECONDS = 355  # of a call, whose last stage has what the others left
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Add = Callable[..., None]  # add_row for one stage: takes name, value and unit


class Settings(NamedTuple):
    """What is measured, and for how long; the defaults suit a data-centre GPU."""

    model: str = "yolov3-spp"
    width: float = 1.0
    side: int = 640  # of images, in pixels
    batches: tuple[int, int] = (16, 64)  # images per step; the memory is too small for eight times the larger
    steps: int = 12  # measured, after as many to warm up
    drawn: tuple[int, int, int] = (256, 555, 32)  # images on disk, their side (as COCO's), and entries for each
    matrix: int = 8192  # side of the square matrices whose product gives the peak
    quickstart: tuple[str, ...] = ()  # options beyond its own


SHORT = (
    "data.shapes={train_images: 16, val_images: 4, image_size: 64}", "data.workers=0", "model.width=0.125",
    "train.image_size=64", "train.epochs=5", "logger.pictures=false",
)  # fmt: skip
TINY = Settings("yolov3-tiny", 0.125, 64, (2, 4), 1, (12, 96, 1), 128, SHORT)


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


def steps(
    settings: Settings, add: Add, folder: Path, *, mode: str = "off", half: torch.dtype = BF16, fused: bool = False
) -> None:
    """The default step on synthetic batches; the larger one also with the profiler."""
    for images in settings.batches[mode != "off" or half != BF16 :]:
        numerics.prepare_numerics(step.configured().train)
        model = step.new_network(settings.model, settings.width).to(DEVICE).to(memory_format=torch.channels_last)
        operations = 3 * models.count_flops(model, (settings.side, settings.side))  # for an image
        batch = step.synthetic(images, settings.side, DEVICE)
        batch.images = batch.images.contiguous(memory_format=torch.channels_last)
        world = distributed.init_distributed_mode(DEVICE.type, 600)
        if fused and DEVICE.type == "cuda":  # its kernels do not run on a CPU
            sync_batchnorm.convert_batch_norm(model, step.configured("train.fused_norm=true").train, world, images)
        run = step.new_step(model, world, half, mode)
        name = f"{half}, {'train.fused_norm' if fused else f'train.compile={mode}'}, batch {images}"
        name = name.removeprefix("torch.")
        add(f"{name}: first step", images / run([batch]).images_per_second, "s")
        _, speed = (run([batch] * settings.steps).images_per_second for _ in range(2))
        add(name, speed, "images/s")
        with torch.autograd.set_multithreading_enabled(False):  # else the backward pass is on a thread of autograd's
            _, alone = (run([batch] * settings.steps).images_per_second for _ in range(2))
        add(f"{name}: with the backward pass on this thread", alone, "images/s")
        add(f"{name}: of the peak", 100 * operations * speed / peak(settings.matrix), "%")
        add("bfloat16 matrix product", peak(settings.matrix) / 1e12, "TFLOP/s")
        add(f"{name}: memory at most", torch.cuda.max_memory_allocated() / 2**30, "GiB")
    with torch.profiler.profile() as profiler:
        run([batch] * COUNT)
    print(profiler.key_averages().table("self_device_time_total", row_limit=20, max_name_column_width=60))


def suppression(settings: Settings, add: Add, _: Path) -> None:
    """Decoding and suppression with few or many boxes."""
    images = settings.batches[-1]
    detector = models.for_detection(step.new_network(settings.model, settings.width).to(DEVICE).eval(), DEVICE)
    postprocess = models.Postprocess(detector.heads, 0.001, nms_iou=0.6, max_detections=300, multi_label=True)
    with torch.inference_mode():
        drawn = detector(step.synthetic(images, settings.side, DEVICE).network_input())
    for name, mean in (("few boxes, as trained", -9.0), ("many boxes, as early", -2.0)):
        seconds = seconds_each(COUNT, postprocess, [torch.randn_like(raw) + mean for raw in drawn])
        add(f"decoding and suppression: {name}", 1000 * seconds / images, "ms/image")


def training(settings: Settings, add: Add, folder: Path) -> None:
    """Epochs of train.py with its defaults on drawn images, each listed and decoded many times."""
    count, side, entries = settings.drawn
    root = ensure_shapes(folder, ShapesConfig(count, count // 4, side))
    path = root / "annotations" / "instances_train.json"
    content = json.loads(path.read_text())
    for part, keys in (("images", {"id"}), ("annotations", {"id", "image_id"})):
        pairs = product(range(entries), content[part])
        content[part] = [entry | {key: entry[key] + 10**6 * number for key in keys} for number, entry in pairs]
    path.write_text(json.dumps(content))
    of_data = ["data=shapes", "data.format=coco", f"data.root={root}", f"data.index_dir={folder}"]
    of_model = [f"model={settings.model}", f"model.width={settings.width}", f"train.image_size={settings.side}"]
    length = [f"train.batch_size={settings.batches[-1]}", "train.epochs=2", "augment.close_mosaic_epochs=0"]
    outcome = train([*of_data, *of_model, *length, f"run_dir={folder}/run", "evaluate.every=0"])
    for row in csv.DictReader((folder / "run" / "times.csv").read_text().splitlines()):
        epoch, speed, waiting = (float(row[key]) for key in ("epoch", "images_per_second", "waiting"))
        add(f"training, epoch {epoch:.0f}: waits for {waiting:.1%}", speed, "images/s")
    add("training: AP", outcome["AP"])


def run_program(run: Path, *options: str, kill_at: str = "") -> tuple[float, float, str]:
    """Seconds to the first step and to the end of a quickstart, and the last line that it prints.

    It is killed once the file ``kill_at`` is in the folder of the run.
    """
    places = [f"run_dir={run}", f"data.root={run.parent}", f"data.index_dir={run.parent}", "logger.every_steps=1"]
    command = [sys.executable, "train.py", "experiment=quickstart", *places, *options]
    first, table, started, output = 0.0, run / "steps.csv", time.perf_counter(), run.with_suffix(".txt")
    with output.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        while process.poll() is None:
            time.sleep(0.02)
            if not first and table.exists() and table.read_text().count("\n") > 1:
                first = time.perf_counter() - started
            if kill_at and (run / kill_at).exists():
                process.kill()
    return first, time.perf_counter() - started, (output.read_text().splitlines() or [""])[-1]


def finetuning(settings: Settings, add: Add, folder: Path) -> None:
    """The quickstart with the drawing of its images, and a fine-tuning of its weights on few."""
    few = [f"model.weights={folder}/quickstart", "data.shapes.train_images=40", "train.epochs=10"]
    for name, options in {"quickstart": [], "finetuning": few}.items():
        first, seconds, line = run_program(folder / name, *options, *settings.quickstart)
        add(f"{name}: first step after", first, "s")
        add(f"{name}: end after", seconds, "s")
        add(f"{name}: last line", line)


def repetition(settings: Settings, add: Add, folder: Path) -> None:
    """A deterministic training twice, the second one killed and resumed, to the same bits."""
    options = ["train.deterministic=true", "data.shapes.train_images=400", *settings.quickstart]
    run_program(folder / "whole", *options)
    run_program(folder / "killed", *options, kill_at="checkpoints/last.pt")
    whole, killed = ((folder / name / "metrics.csv").read_text() for name in ("whole", "killed"))
    add("killed after epochs", killed.count("\n") - 1)
    add("train.deterministic twice: the same as far as that", str(whole.startswith(killed)))
    run_program(folder / "killed", *options, "resume=auto")
    add("resumed: the same to the end", str((folder / "killed" / "metrics.csv").read_text() == whole))


def memory(settings: Settings, add: Add, folder: Path) -> None:
    """What a training says whose batch is too large."""
    images = 8 * settings.batches[-1]
    of_model = [f"model={settings.model}", f"model.width={settings.width}", f"train.image_size={settings.side}"]
    length = [f"data.shapes.train_images={images}", f"train.batch_size={images}", "train.epochs=1"]
    add("out of memory", run_program(folder / "run", *settings.quickstart, *of_model, *length)[-1])


# Call, stage and deadline in seconds, most useful first.
STAGES: dict[str, tuple[int, Callable[..., None], int]] = {
    "eager": (1, steps, 45), "fused": (1, partial(steps, fused=True), 40),
    "compiled": (1, partial(steps, mode="default"), 140), "suppression": (1, suppression, 30),
    "training": (1, training, 110), "finetuning": (2, finetuning, 110), "repetition": (2, repetition, 75),
    "memory": (2, memory, 35), "float16": (2, partial(steps, half=torch.float16), 35),
    "autotune": (2, partial(steps, mode="max-autotune-no-cudagraphs"), CALL_SECONDS),
}  # fmt: skip


def main(*arguments: str) -> None:
    """Run each stage in a process of its own; with --inside, in this one."""
    path = next((argument for argument in arguments if argument.endswith(".csv")), "gpu.csv")
    chosen = {name: stage for name, stage in STAGES.items() if {name, str(stage[0])} & {*arguments}}
    if not chosen:
        print(__doc__)
        sys.exit("--help" not in arguments)
    ends = time.monotonic() + CALL_SECONDS
    for name, (call, stage, limit) in chosen.items():
        add, tiny = partial(add_row, Path(path), (call, name)), {"--tiny"} & {*arguments}
        if "--inside" in arguments:
            torch.compiler.set_stance("force_eager" if tiny else "default")
            with tempfile.TemporaryDirectory() as folder:
                stage(TINY if tiny else Settings(), add, Path(folder))
            continue
        print(f"{name}:", flush=True)
        command = [sys.executable, "-m", "scripts.bench.gpu", "--inside", name, path, *tiny]
        with subprocess.Popen(command, start_new_session=True) as process:
            seconds = max(0, min(limit, ends - time.monotonic()))
            try:
                if code := process.wait(seconds):
                    add("FAILED", f"exit code {code}")
            except subprocess.TimeoutExpired:
                add("FAILED", f"killed after {seconds:.0f} s")
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with its children


if __name__ == "__main__":
    main(*sys.argv[1:])
