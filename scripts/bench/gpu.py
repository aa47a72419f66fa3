"""What a CPU cannot show about training and evaluating on a GPU, in less than ten minutes.

    python -m scripts.bench.gpu [--tiny] [--out gpu.jsonl] [stage ...]

Each stage is a process with a deadline and appends its figures to --out, as JSON lines. The table
comes last, complete as far as the stages came. --tiny takes seconds a stage, needs no GPU, and its
figures mean nothing. The packages that a bare machine with torch may lack: hydra-core, omegaconf,
hotcoco, lazy-loader.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import cv2
import torch
from torch import Tensor, nn

from conf.entry import compose
from conf.network import build_loss
from conf.schema import TrainConfig
from data import Batch, Colour, MultiScale, TrainBatchSampler, TrainDataset, make_loader, open_annotations
from data.loader import PREFETCHED_BATCHES
from models import Postprocess, for_detection
from scripts.bench import step
from scripts.bench.data import RepeatedSource, repeated
from train_utils.detect import detect, detect_batches
from train_utils.distributed import init_distributed_mode, sum_over_ranks
from train_utils.numerics import allow_tf32, keep_freed_memory
from train_utils.progress import Progress

COUNT = 3  # batches of an evaluation


@dataclass(frozen=True)
class Settings:
    """What is measured, and how long; by default on a data-centre GPU."""

    device: torch.device
    out: Path  # of the figures, JSON lines
    tiny: bool = False
    model: str = "yolov3-spp"
    width: float = 1.0
    side: int = 640  # of images, in pixels
    batches: tuple[int, int] = (16, 64)  # images in a step
    steps: int = 12  # counted ones, after as many that warm up
    drawn: tuple[int, int] = (256, 555)  # images on disk for the loader, and their side: as many pixels as COCO's
    workers: int = 15  # of the loader
    matrix: int = 8192  # side of the matrices whose product shows the peak
    stage: str = ""

    def add(self, figure: str, value: float | str, unit: str = "") -> None:
        """Append a figure to the file."""
        row = {"stage": self.stage, "figure": figure, "value": value, "unit": unit}
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def wait(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds_each(self, run: Callable[[], object], count: int) -> float:
        """Mean seconds of ``run``, after a warm-up."""
        for _ in range(2):  # the second time counts
            started = time.perf_counter()
            for _ in range(count):
                run()
            self.wait()
        return (time.perf_counter() - started) / count

    def new_step(self, compiled: str = "off") -> Callable[[Batch], object]:
        """The default step in bfloat16, on the device."""
        keep_freed_memory()
        allow_tf32(False)
        torch.backends.cudnn.benchmark = True
        network = step.new_network(self.model, self.width).to(self.device)
        return step.new_step(network, init_distributed_mode(self.device.type, 600), torch.bfloat16, compiled)

    def synthetic(self, images: int) -> Batch:
        """A batch of noise on the device."""
        return step.synthetic(images, self.side, self.device)


def machine(settings: Settings) -> None:
    """Names, versions and the peak of arithmetic."""
    settings.add("device", torch.cuda.get_device_name() if settings.device.type == "cuda" else "CPU")
    settings.add("versions", f"torch {torch.__version__}, OpenCV {cv2.__version__}, {time.strftime('%Y-%m-%d')}")
    left, right = (torch.randn(2 * [settings.matrix], device=settings.device, dtype=torch.bfloat16) for _ in range(2))
    seconds = settings.seconds_each(lambda: left @ right, settings.steps)
    settings.add("bfloat16 matrix product", 2 * settings.matrix**3 / seconds / 1e12, "TFLOP/s")


def correct(settings: Settings) -> None:
    """Maps, and gradients with fixed statistics, in float32 against those of float64 on the CPU."""
    allow_tf32(False)
    config = compose("train", TrainConfig, ["data=shapes"])
    exact = step.new_network(settings.model, 0.25).double().eval()
    here = deepcopy(exact).float().to(settings.device).to(memory_format=torch.channels_last)
    batch, results = step.synthetic(4, 64 if settings.tiny else 160, settings.device), []
    for network, device, dtype in ((exact, torch.device("cpu"), torch.float64), (here, settings.device, torch.float32)):
        maps, loss = network(batch.to(device).network_input().to(dtype)), build_loss(network.heads, config.loss)
        targets = batch.targets.to(device)
        loss(maps, targets, objectness_ratio=1.0, sum_over_ranks=sum_over_ranks, world_size=1).total.backward()
        results.append((maps, [parameter.grad for parameter in network.parameters()]))
    for name, expected, ours in zip(("maps", "gradients"), *results, strict=True):
        worst = max(_relative(one, other) for one, other in zip(expected, ours, strict=True))
        settings.add(f"float32 {name} against float64 on the CPU", worst)


def _relative(expected: Tensor, ours: Tensor) -> float:
    difference = ours.detach().cpu().double() - expected.detach()
    return float(difference.abs().max() / expected.detach().abs().max().clamp(min=1e-12))


def steps(settings: Settings) -> None:
    """Speed, memory and waits of the default step, eager and compiled."""
    for compiled, images in (*(("off", images) for images in settings.batches), ("default", settings.batches[-1])):
        run, batch, started = settings.new_step(compiled), settings.synthetic(images), time.perf_counter()
        run(batch)
        name = f"train.compile={compiled}, batch {images}"
        settings.add(f"{name}: first step", time.perf_counter() - started, "s")
        settings.add(name, images / settings.seconds_each(partial(run, batch), settings.steps), "images/s")
        if settings.device.type == "cuda":
            settings.add(f"{name}: peak of memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")
        if compiled == "off":
            with torch.profiler.profile() as profiler:
                run(batch)
            waits = sum(event.count for event in profiler.key_averages() if event.key == "aten::_local_scalar_dense")
            settings.add(f"{name}: waits for the device in a step", waits)


class WithMaps(nn.Module):
    """Computes the network's maps and returns others, of a known density, in their place."""

    def __init__(self, network: nn.Module, maps: Sequence[Tensor]) -> None:
        super().__init__()
        self.network, self.maps = network, list(maps)

    def forward(self, images: Tensor) -> list[Tensor]:
        self.network(images)
        return self.maps


def evaluation(settings: Settings) -> None:
    """Images a second of the forward pass alone, and with the suppression of many or few boxes."""
    device, batch = settings.device, settings.synthetic(settings.batches[-1])
    network = for_detection(step.new_network(settings.model, settings.width).to(device).eval(), device)
    images = COUNT * len(batch.images)
    with torch.inference_mode():
        shapes = [raw.shape for raw in network(batch.network_input())]
    postprocess = Postprocess(network.heads, confidence=0.001, nms_iou=0.6, max_detections=300, multi_label=True)
    for name, dtype in (("float32", None), ("bfloat16", torch.bfloat16)):

        def alone(dtype: torch.dtype | None = dtype) -> None:
            list(detect_batches(network, [batch] * COUNT, lambda _: [], device, dtype=dtype))

        settings.add(f"{name}: forward pass alone", images / settings.seconds_each(alone, 1), "images/s")
        for when, logit in (("trained", -9.0), ("early", -2.0)):  # the mean of each logit
            generator = torch.Generator().manual_seed(0)
            model = WithMaps(network, [(torch.randn(s, generator=generator) + logit).to(device) for s in shapes])
            progress = Progress(images, "evaluate", enabled=False)
            whole = partial(
                detect, model, [batch] * COUNT, postprocess, lambda *given: given[-1], device, progress, dtype
            )
            settings.add(f"{name}: evaluation, maps {when}", images / settings.seconds_each(whole, 1), "images/s")


def loader(settings: Settings) -> None:
    """Images a second of a step on synthetic input, of workers alone, and of both together."""
    cv2.setNumThreads(0)
    run, images = settings.new_step(), settings.batches[-1]
    seconds = settings.seconds_each(partial(run, settings.synthetic(images)), settings.steps)
    settings.add("step on synthetic input", images / seconds, "images/s")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        count, side = settings.drawn
        shapes = f"data.shapes={{train_images: {count}, val_images: 1, image_size: {side}}}"
        options = ["data=shapes", shapes, f"data.root={folder}/set", f"data.index_dir={folder}/index", "augment=mosaic"]
        config = compose("train", TrainConfig, options)
        listed = open_annotations(config.data, "train")
        annotations = repeated(listed)  # so that a batch hardly has an image twice
        augment = replace(config.augment, colour=Colour.device)
        for name, is_fed in (("alone", False), ("feeding a step", True)):
            sampler = TrainBatchSampler(
                len(annotations), images, images, 1, 0, 0, MultiScale(settings.side, 1, 1, 32, 0)
            )
            dataset = TrainDataset(annotations, augment, 0, 300, RepeatedSource(listed, config.data.on_error))
            batches = iter(make_loader(dataset, sampler, settings.workers, settings.device))
            for number in (PREFETCHED_BATCHES * settings.workers, 2 * settings.steps):  # the second time counts
                started = time.perf_counter()
                for batch in islice(batches, number):
                    if is_fed:
                        run(batch)
                settings.wait()
            speed = number * images / (time.perf_counter() - started)
            settings.add(f"{settings.workers} workers {name}", speed, "images/s")


# Deadlines in seconds, in the order of worth.
STAGES = {machine: 45, correct: 60, steps: 230, evaluation: 80, loader: 100}


def main() -> None:
    """Run each stage in a process of its own and print the table; with --inside, run the stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [stage.__name__ for stage in STAGES]
    parser.add_argument("stages", nargs="*", metavar="stage", help=f"{', '.join(names)}; all if none is given")
    parser.add_argument("--tiny", action="store_true", help="small networks and images, without a GPU, too")
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"), help="file of the figures; it is replaced")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = Settings(device, given.out)
    if given.tiny:
        settings = Settings(device, given.out, True, "yolov3-tiny", 0.25, 64, (2, 4), 1, (12, 96), 1, 128)
    chosen = {stage: limit for stage, limit in STAGES.items() if stage.__name__ in (given.stages or names)}
    if given.inside:
        for stage in chosen:
            stage(replace(settings, stage=stage.__name__))
        return
    given.out.write_text("", encoding="utf-8")
    for stage, limit in chosen.items():
        command = [sys.executable, "-m", "scripts.bench.gpu", "--inside", "--out", str(given.out), stage.__name__]
        try:
            subprocess.run([*command, *["--tiny"] * given.tiny], timeout=limit, check=True)
        except subprocess.SubprocessError as error:
            replace(settings, stage=stage.__name__).add("whole stage", f"FAILED: {error}")
    for line in given.out.read_text(encoding="utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        value = row["value"] if isinstance(row["value"], str) else f"{row['value']:.4g} {row['unit']}"
        print(f"{row['stage']:12s} {row['figure']:58s} {value}")


if __name__ == "__main__":
    main()
