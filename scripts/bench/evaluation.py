"""Seconds and memory of an evaluation after the network: scoring by each library, what ranks
exchange, suppression.

    python -m scripts.bench.evaluation scoring [rounds]
    python -m scripts.bench.evaluation gather [rounds]
    python -m scripts.bench.evaluation nms [rounds]

Drawn data of COCO's extent: 5,000 images x 80 classes x 100 detections, with crowds and areas of
masks. The contenders take turns, and ratios are those of the medians. pycocotools takes most of a
minute a round.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torchvision.ops import nms

from models.decode import nms_in_each_class
from train_utils.config import BACKENDS
from train_utils.distributed import barrier, gather_arrays, init_distributed_mode
from train_utils.processes.ending import shutdown
from train_utils.scores.coco_eval import score
from train_utils.scores.detections import DETECTION, PACKED, Detections, GroundTruth, pack, unpack

IMAGES, CLASSES, FOUND = 5000, 80, 100
RANKS = (1, 2, 4)


def draw(seed: int = 0) -> tuple[GroundTruth, Detections]:
    """About 37,000 boxes and 500,000 detections, a third of them near a box; image_id of these
    holds positions.
    """
    rng = np.random.default_rng(seed)
    counts = rng.poisson(7.3, IMAGES)
    total = int(counts.sum())
    sizes = np.exp(rng.uniform(np.log(8), np.log(400), (total, 2)))
    boxes = np.concatenate([rng.uniform(0, 1, (total, 2)) * (640 - sizes), sizes], axis=1).round(2)
    truth = GroundTruth(
        image_ids=rng.permutation(600_000)[:IMAGES],
        sizes=np.full((IMAGES, 2), 640),
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        boxes_xywh=boxes,
        classes=(rng.power(0.6, total) * CLASSES).astype(np.int64),
        crowd=rng.random(total) < 0.01,
        areas=boxes[:, 2] * boxes[:, 3] * rng.uniform(0.4, 1, total),
        names=[f"class {number}" for number in range(CLASSES)],
    )
    found = np.zeros(IMAGES * FOUND, dtype=DETECTION)
    images = np.repeat(np.arange(IMAGES), FOUND)
    near = (rng.random(len(found)) < 0.33) & (counts[images] > 0)
    of_box = truth.offsets[images] + (rng.random(len(found)) * counts[images]).astype(np.int64)
    of_box = np.minimum(of_box, total - 1)
    far = np.concatenate([rng.uniform(0, 500, (len(found), 2)), rng.uniform(8, 300, (len(found), 2))], axis=1)
    moved = boxes[of_box] + rng.normal(0, 0.08, (len(found), 4)) * boxes[of_box][:, [2, 3, 2, 3]]
    found["image_id"] = images
    found["class"] = np.where(near, truth.classes[of_box], rng.integers(0, CLASSES, len(found)))
    found["box_xywh"] = np.where(near[:, None], moved, far).clip(0)
    found["score"] = np.where(near, rng.beta(2, 3, len(found)), rng.beta(1, 12, len(found)))
    return truth, found


def score_once(backend: str, results: multiprocessing.Queue[tuple[float, float, list[float]]]) -> None:
    """Put the seconds of one scoring, the MB that it added to the process's peak, and the 12
    figures into results.
    """
    truth, found = draw()
    found["image_id"] = truth.image_ids[found["image_id"]]
    score(truth, found[:1000], backend)  # imports
    before, started = _peak_mb(), time.perf_counter()
    result = score(truth, found, backend)
    results.put((time.perf_counter() - started, _peak_mb() - before, list(result.figures.values())))


def scoring(rounds: int) -> None:
    """Each library in a process of its own, in turn."""
    context = multiprocessing.get_context("spawn")
    runs: dict[str, list[tuple[float, float, list[float]]]] = {backend: [] for backend in BACKENDS}
    for _ in range(rounds):
        for backend, done in runs.items():
            results: multiprocessing.Queue[tuple[float, float, list[float]]] = context.Queue()
            process = context.Process(target=score_once, args=(backend, results))
            process.start()
            done.append(results.get())
            process.join()
    base, figures = statistics.median(run[0] for run in runs["pycocotools"]), runs["pycocotools"][0][2]
    for backend, done in runs.items():
        seconds = statistics.median(run[0] for run in done)
        equal = "equal figures" if all(run[2] == figures for run in done) else "DIFFERENT FIGURES"
        memory = max(run[1] for run in done)
        print(f"{backend:18s} {seconds:7.2f} s  {base / seconds:6.1f}x  +{memory:5.0f} MB  {equal}", flush=True)


def gather(rounds: int) -> None:
    """The whole evaluation after the network on 1, 2 and 4 processes over gloo, each with its share
    of the images.
    """
    for ranks in RANKS:
        launch = ["torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
        command = [sys.executable, "-m", *launch, "-m", "scripts.bench.evaluation", "gather_worker", str(rounds)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        print(f"{ranks} process(es): {done.stdout.strip()}", flush=True)


def gather_worker(rounds: int) -> None:
    """One of the processes: packs, sends, and on rank 0 unpacks and scores; rank 0 prints the
    medians.
    """
    world = init_distributed_mode("cpu", timeout_seconds=600)
    truth, everything = draw()
    mine = everything[everything["image_id"] % world.world_size == world.rank]
    exchange, whole = [], []
    for _ in range(rounds + 1):  # the first one connects and imports
        barrier()
        started = time.perf_counter()
        gathered = gather_arrays(pack(mine))
        if gathered is not None:
            found = unpack(np.concatenate(gathered), truth.image_ids)
            exchange.append(time.perf_counter() - started)
            result = score(truth, found, "auto")
            whole.append(time.perf_counter() - started)
    if world.is_main:
        exchanged, scored = statistics.median(exchange[1:]), statistics.median(whole[1:])
        print(f"exchange {exchanged:.3f} s, with scoring {scored:.2f} s ({result.backend}), ", end="")
        print(f"{PACKED.itemsize} bytes a detection, figures {json.dumps(list(result.figures.values())[:3])}")
    shutdown()


def candidates(dense: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes (n, 4), scores (n,) best first and classes (n,) of one image, as they enter
    suppression.

    Dense: an untrained network at 416 pixels, 10,647 boxes about as large as their anchors, 28,000
    scores anywhere. Otherwise a trained one, 5,300 scores in clusters around 25 objects, each of a
    few classes.
    """
    generator = torch.Generator().manual_seed(0)
    if dense:
        centres, sizes = [], []
        for stride, sides in ((32, (116, 156, 373)), (16, (30, 62, 59)), (8, (10, 16, 33))):
            cells = torch.cartesian_prod(*[torch.arange(416 // stride)] * 2).repeat(3, 1)
            centres.append((cells + torch.rand(cells.shape, generator=generator)) * stride)
            scale = torch.randn(cells.shape, generator=generator).mul(0.3).exp()
            sizes.append(torch.tensor(sides).repeat_interleave(len(cells) // 3)[:, None] * scale)
        centre, size, number = torch.cat(centres), torch.cat(sizes), 28_000
        rows = torch.randint(len(centre), (number,), generator=generator)
        classes = torch.randint(CLASSES, (number,), generator=generator)
    else:
        objects, number = 25, 5_300
        rows = torch.randint(objects, (number,), generator=generator)
        size = torch.rand(objects, 2, generator=generator) * 150 + 20
        centre = torch.rand(objects, 2, generator=generator) * 416
        classes = (rows * 7 + torch.randint(4, (number,), generator=generator)) % CLASSES
    jitter = torch.randn(number, 4, generator=generator) * 0.1
    middle = centre[rows] + jitter[:, :2] * size[rows]
    half = size[rows] * jitter[:, 2:].exp() / 2
    scores = torch.rand(number, generator=generator).sort(descending=True).values
    return torch.cat((middle - half, middle + half), dim=1), scores, classes


def nms_by_offset(boxes_xyxy: Tensor, scores: Tensor, classes: Tensor, iou: float) -> Tensor:
    """The other way: one suppression of all classes, which an offset moves apart."""
    reach = boxes_xyxy.max() - boxes_xyxy.min() + 1
    kept: Tensor = nms(boxes_xyxy + (classes * reach)[:, None], scores, iou)
    return kept


def suppression(rounds: int) -> None:
    """Class by class against one run with offsets, on the CPU with one thread."""
    torch.set_num_threads(1)
    ways: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
        "class by class": nms_in_each_class,
        "class offset": nms_by_offset,
    }
    for dense in (True, False):
        given = candidates(dense)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        kept = {}
        for _ in range(rounds):
            for way, function in ways.items():
                started = time.perf_counter()
                kept[way] = function(*given, 0.6)
                seconds[way].append(time.perf_counter() - started)
        medians = [statistics.median(found) for found in seconds.values()]
        # In float64 the offset rounds no corner that decides.
        exact = nms_by_offset(given[0].double(), given[1].double(), given[2], 0.6)
        equal = "equal" if kept["class by class"].equal(exact.sort().values) else "NOT equal"
        print(f"{'dense' if dense else 'trained'}, {len(given[0])} candidates, {len(exact)} kept: ", end="")
        print(f"class by class {medians[0] * 1e3:.1f} ms, class offset {medians[1] * 1e3:.1f} ms, ", end="")
        print(f"{medians[1] / medians[0]:.1f}x, {equal}")


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(part: str, rounds: str = "2") -> None:
    """Run one part."""
    {"scoring": scoring, "gather": gather, "gather_worker": gather_worker, "nms": suppression}[part](int(rounds))


if __name__ == "__main__":
    main(*sys.argv[1:])
