"""What a CPU cannot show about training and evaluating on a GPU, in less than ten minutes.

    python -m scripts.bench.gpu [--tiny] [--seconds 560] [--out gpu.jsonl] [stage ...]

Each stage is a process with a deadline and appends its figures to --out, as JSON lines. The table
comes last, complete as far as the stages came. --tiny takes seconds a stage, needs no GPU, and its
figures mean nothing. The packages that a bare machine with torch may lack: hydra-core, omegaconf,
hotcoco, lazy-loader.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import cv2
import torch
from torch import Tensor, nn

from data import (
    AugmentConfig,
    Colour,
    DataConfig,
    MultiScale,
    ShapesConfig,
    TrainBatchSampler,
    TrainDataset,
    make_loader,
    open_annotations,
)
from data.loader import PREFETCHED_BATCHES
from models import Postprocess, count_flops, for_detection
from scripts.bench.common import (
    Settings,
    make_step,
    new_loss,
    new_network,
    new_step,
    options,
    seconds_each,
    settings_of,
    synthetic,
    wait_for,
)
from scripts.bench.data_modes import LISTED, RepeatedSource, repeated
from train_utils.detect import detect, detect_batches
from train_utils.distributed import sum_over_ranks
from train_utils.numerics import allow_tf32
from train_utils.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
LEAST_SECONDS = 15  # a stage with less than this left is not begun
PEAK = "bfloat16 matrix product"
PASSES = 3  # a backward pass computes twice what a forward pass does
SHAPES_SIDE = 555  # of the drawn images, for as many pixels as COCO's
COUNT = 3  # batches of an evaluation


class Rows:
    """Figures in a file of JSON lines; ``stage`` is that of new ones."""

    def __init__(self, path: Path, stage: str = "") -> None:
        self._path, self._stage = path, stage

    def add(self, figure: str, value: float | str, unit: str = "", reach: str = "") -> None:
        """Append a figure; ``reach`` is what it should be."""
        row = {"stage": self._stage, "figure": figure, "value": value, "unit": unit, "reach": reach}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def all(self) -> list[dict[str, Any]]:
        """The figures so far, those of earlier stages included."""
        return [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]


def machine(settings: Settings, rows: Rows) -> None:
    """Names, versions and the peak of arithmetic."""
    rows.add("device", torch.cuda.get_device_name() if settings.device.type == "cuda" else "CPU")
    rows.add("versions", f"torch {torch.__version__}, OpenCV {cv2.__version__}, {time.strftime('%Y-%m-%d')}")
    left, right = (torch.randn(2 * [settings.matrix], device=settings.device, dtype=torch.bfloat16) for _ in range(2))
    rows.add(PEAK, 2 * settings.matrix**3 / seconds_each(left.matmul, [right], settings) / 1e12, "TFLOP/s")


def correct(settings: Settings, rows: Rows) -> None:
    """Maps, and gradients with fixed statistics, in float32 against those of float64 on the CPU."""
    settings = settings if settings.tiny else replace(settings, width=0.25, side=160, batches=(4, 8))
    allow_tf32(False)
    exact = new_network(settings).double().eval()
    here = deepcopy(exact).float().to(settings.device).to(memory_format=torch.channels_last)
    batch, found = synthetic(settings, settings.batches[0]), []
    for network, device, dtype in ((exact, torch.device("cpu"), torch.float64), (here, settings.device, torch.float32)):
        maps = network(batch.to(device).network_input().to(dtype))
        parts = new_loss(network)(
            maps, batch.targets.to(device), objectness_ratio=1.0, sum_over_ranks=sum_over_ranks, world_size=1
        )
        parts.total.backward()
        found.append((maps, [parameter.grad for parameter in network.parameters()]))
    for name, expected, ours in zip(("maps", "gradients"), *found, strict=True):
        worst = max(_relative(one, other) for one, other in zip(expected, ours, strict=True))
        rows.add(f"float32 {name} against float64 on the CPU", worst, "", "1e-4")


def _relative(expected: Tensor, found: Tensor) -> float:
    difference = found.detach().cpu().double() - expected.detach()
    return float(difference.abs().max() / expected.detach().abs().max().clamp(min=1e-12))


def eager(settings: Settings, rows: Rows) -> None:
    """Speed, memory and waits of the default step."""
    for images in settings.batches:
        _speed(settings, rows, images, "")
    step, batch = new_step(settings), synthetic(settings, settings.batches[0])
    make_step(step, batch)
    with torch.profiler.profile() as profiler:
        make_step(step, batch)
    waits = sum(event.count for event in profiler.key_averages() if event.key == "aten::_local_scalar_dense")
    rows.add("waits for the device in a step", waits, reach="1")


def compiled(settings: Settings, rows: Rows) -> None:
    """The same with train.compile=default, and the seconds that compiling takes."""
    _speed(settings, rows, settings.batches[-1], "default")


def _speed(settings: Settings, rows: Rows, images: int, mode: str) -> None:
    step, batch, started = new_step(settings, mode=mode), synthetic(settings, images), time.perf_counter()
    make_step(step, batch)
    rows.add(f"batch {images}: first step", time.perf_counter() - started, "s")
    seconds = seconds_each(partial(make_step, step), [batch], settings)
    rows.add(f"batch {images}", images / seconds, "images/s", "840" if mode else "620")
    if settings.device.type == "cuda":
        rows.add(f"batch {images}: peak of memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")
    flops = PASSES * count_flops(new_network(settings), (settings.side, settings.side))
    peak = next((row["value"] for row in rows.all() if row["figure"] == PEAK), None)
    if peak is not None:
        rows.add(f"batch {images}: share of the {PEAK}", 100 * flops * images / seconds / 1e12 / peak, "%")


class WithMaps(nn.Module):
    """Computes the network's maps and returns others, of a known density, in their place."""

    def __init__(self, network: nn.Module, maps: Sequence[Tensor]) -> None:
        super().__init__()
        self.network, self.maps = network, list(maps)

    def forward(self, images: Tensor) -> list[Tensor]:
        self.network(images)
        return self.maps


def evaluation(settings: Settings, rows: Rows) -> None:
    """Images a second of the forward pass alone, and with the suppression of many or few boxes."""
    network = for_detection(new_network(settings).to(settings.device).eval(), settings.device)
    batch = synthetic(settings, settings.batches[-1])
    images, once = len(batch.images), replace(settings, steps=1)
    with torch.inference_mode():
        shapes = [raw.shape for raw in network(batch.network_input())]
    postprocess = Postprocess(network.heads, confidence=0.001, nms_iou=0.6, max_detections=300, multi_label=True)

    def alone(dtype: torch.dtype | None) -> None:
        list(detect_batches(network, [batch] * COUNT, lambda _: [], settings.device, dtype=dtype))

    def whole(model: nn.Module) -> None:
        progress = Progress(COUNT * images, "evaluate", enabled=False)
        detect(model, [batch] * COUNT, postprocess, lambda _batch, _i, boxes: boxes, settings.device, progress, dtype)

    for name, dtype in (("float32", None), ("bfloat16", torch.bfloat16)):
        forward = seconds_each(alone, [dtype], once) / COUNT
        rows.add(f"{name}: forward pass alone", images / forward, "images/s")
        for when, logit in (("trained", -9.0), ("early", -2.0)):  # the mean of each logit
            generator = torch.Generator().manual_seed(0)
            maps = [(torch.randn(shape, generator=generator) + logit).to(settings.device) for shape in shapes]
            seconds = seconds_each(whole, [WithMaps(network, maps)], once) / COUNT
            rows.add(f"{name}: evaluation, maps {when}", images / seconds, "images/s")
            rows.add(f"{name}: against forward alone, maps {when}", 100 * forward / seconds, "%", "70 %")


def loader(settings: Settings, rows: Rows) -> None:
    """Images a second that workers make alone, and of a training that they feed."""
    cv2.setNumThreads(0)
    step, images = new_step(settings), settings.batches[-1]
    train = partial(make_step, step)
    synthetic_speed = images / seconds_each(train, [synthetic(settings, images)], settings)
    rows.add("step on synthetic input", synthetic_speed, "images/s")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        shapes = ShapesConfig(settings.drawn, 1, 96 if settings.tiny else SHAPES_SIDE)
        config = options(
            DataConfig, "data/shapes.yaml", shapes=shapes, root=f"{folder}/set", index_dir=f"{folder}/index"
        )
        listed = open_annotations(config, "train")
        annotations = repeated(listed, -(-LISTED // len(listed)))  # so that a batch hardly has an image twice
        for name, is_fed in (("alone", False), ("feeding a step", True)):
            augment = options(AugmentConfig, "augment/mosaic.yaml", colour=Colour.device)
            sizes = MultiScale(settings.side, 1, 1, 32, 0)
            sampler = TrainBatchSampler(len(annotations), images, images, 1, 0, 0, sizes)
            dataset = TrainDataset(annotations, augment, 0, 300, RepeatedSource(listed, config.on_error))
            batches = iter(make_loader(dataset, sampler, settings.workers, settings.device))
            for count in (PREFETCHED_BATCHES * settings.workers, 2 * settings.steps):  # the second time counts
                started = time.perf_counter()
                for batch in islice(batches, count):
                    if is_fed:
                        train(batch)
                wait_for(settings.device)
            speed = count * images / (time.perf_counter() - started)
            rows.add(f"{settings.workers} workers {name}", speed, "images/s")
    rows.add("against synthetic input", 100 * speed / synthetic_speed, "%", "97 %")


def marked_tests(settings: Settings, rows: Rows) -> None:
    """The suite's tests with the marker gpu."""
    if settings.device.type == "cpu":
        rows.add("tests marked gpu", "no GPU")
        return
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-o", "addopts=--import-mode=importlib", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    for line in (done.stdout + done.stderr).splitlines()[-20:]:
        rows.add("tests marked gpu", line[:110])


# Deadlines in seconds, in the order of worth: the time may be over before the last.
STAGES = {
    machine: 45, correct: 60, eager: 80, compiled: 150, evaluation: 80, loader: 100, marked_tests: 120,
}  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The figures, a line each."""
    lines = [f"{'stage':14s}{'figure':52s} {'measured':>20s}   to reach"]
    for row in rows:
        shown = row["value"] if isinstance(row["value"], str) else f"{row['value']:.4g} {row['unit']}".strip()
        lines.append(f"{row['stage']:14s}{row['figure']:52s} {shown:>20s}   {row['reach']}".rstrip())
    return "\n".join(lines)


def run_stages(names: Sequence[str], given: argparse.Namespace) -> None:
    """Run each stage in a process of its own until its deadline; print the table."""
    given.out.write_text("", encoding="utf-8")
    end = time.monotonic() + given.seconds
    for name, limit in ((stage.__name__, limit) for stage, limit in STAGES.items() if stage.__name__ in names):
        left, rows = end - time.monotonic(), Rows(given.out, name)
        if left < LEAST_SECONDS:
            rows.add("whole stage", "no time left")
            continue
        command = [sys.executable, "-m", "scripts.bench.gpu", "--inside", "--out", str(given.out), name]
        try:
            done = subprocess.run([*command, *["--tiny"] * given.tiny], timeout=min(left, limit), check=False)
            problem = f"exit code {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"not done after {min(left, limit):.0f} s"
        if problem:
            rows.add("whole stage", f"FAILED: {problem}")
    print(table(Rows(given.out).all()))


def main() -> None:
    """Run the stages; with --inside, in a stage's own process, the stage itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [stage.__name__ for stage in STAGES]
    parser.add_argument("stages", nargs="*", metavar="stage", help=f"{', '.join(every)}; all if none is given")
    parser.add_argument("--tiny", action="store_true", help="small networks and images, without a GPU, too")
    parser.add_argument("--seconds", type=float, default=560, help="limit of all stages together")
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"), help="file of the figures; it is replaced")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := set(given.stages) - set(every):
        parser.error(f"there is no stage {min(unknown)!r}. fix: one of {', '.join(every)}")
    if not given.inside:
        run_stages(given.stages or every, given)
        return
    for stage in STAGES:
        if stage.__name__ in given.stages:
            stage(settings_of(given.tiny), Rows(given.out, stage.__name__))


if __name__ == "__main__":
    main()
