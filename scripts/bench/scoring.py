"""Seconds of an evaluation after the network: scoring and suppression.

    python -m scripts.bench.scoring scoring [rounds]
    python -m scripts.bench.scoring nms [rounds]

Random data of COCO's size: 5,000 images, 80 classes, 100 detections per image, with crowds and
areas of masks. pycocotools takes one to two minutes a round.
"""

from __future__ import annotations

import sys
import time
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torchvision.ops import nms

from models.decode import nms_in_each_group
from scripts.bench.rounds import in_fresh_process, medians, seconds_of, take_turns
from train_utils.coco_eval import score
from train_utils.config import Backend
from train_utils.detections import DETECTION, Detections, GroundTruth

IMAGES, CLASSES, FOUND = 5000, 80, 100


def draw(seed: int = 0) -> tuple[GroundTruth, Detections]:
    """About 37,000 boxes and 500,000 detections, a third of them near a box.

    The detections' image_id holds positions in the data set.
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


def score_once(backend: str) -> tuple[float, list[float]]:
    """Seconds of one scoring, and the 12 figures."""
    truth, found = draw()
    found["image_id"] = truth.image_ids[found["image_id"]]
    score(truth, found[:1000], backend)  # imports
    started = time.perf_counter()
    result = score(truth, found, backend)
    return time.perf_counter() - started, list(result.figures.values())


def scoring(rounds: int) -> None:
    """Compare the libraries."""
    runs = take_turns({backend: partial(in_fresh_process, score_once, backend) for backend in Backend}, rounds)
    seconds = medians({name: [run[0] for run in done] for name, done in runs.items()})
    for backend, done in runs.items():
        equal = all(run[1] == runs["pycocotools"][0][1] for run in done)
        speed = seconds["pycocotools"] / seconds[backend]
        print(f"{backend:18s} {seconds[backend]:7.2f} s  {speed:6.1f}x  figures {'equal' if equal else 'DIFFERENT'}")


def candidates(dense: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes (n, 4), scores (n,) best first and classes (n,) of one image, before suppression.

    Dense is an untrained network at 416 pixels: 10,647 boxes about as large as their anchors, with
    28,000 scores anywhere. Otherwise it is a trained one: 5,300 scores in clusters around 25
    objects, each of a few classes.
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
    """The alternative: one suppression of all classes, moved apart by an offset."""
    reach = boxes_xyxy.max() - boxes_xyxy.min() + 1
    kept: Tensor = nms(boxes_xyxy + (classes * reach)[:, None], scores, iou)
    return kept


def suppression(rounds: int) -> None:
    """Class by class against one run with offsets, on the CPU with one thread."""
    torch.set_num_threads(1)
    ways = {"class by class": nms_in_each_group, "class offset": nms_by_offset}
    for dense in (True, False):
        given = candidates(dense)
        found = take_turns({name: partial(seconds_of, way, *given, 0.6) for name, way in ways.items()}, rounds)
        ours, other = medians(found).values()
        # In float64 the offset rounds no corner that decides.
        exact = nms_by_offset(given[0].double(), given[1].double(), given[2], 0.6)
        equal = "equal" if nms_in_each_group(*given, 0.6).equal(exact.sort().values) else "NOT equal"
        print(
            f"{'dense' if dense else 'trained'}, {len(given[0])} candidates, {len(exact)} kept: class by class "
            f"{ours * 1e3:.1f} ms, class offset {other * 1e3:.1f} ms, {other / ours:.1f}x, {equal}"
        )


def main(part: str, rounds: str = "2") -> None:
    """Run one part."""
    {"scoring": scoring, "nms": suppression}[part](int(rounds))


if __name__ == "__main__":
    main(*sys.argv[1:])
