"""Building and opening the index of a large COCO json: seconds, peak memory, and memory of loader
workers.

    python -m scripts.bench.index images=118287 boxes=860001 folder=/tmp/index_bench

The data set is made up: a json of that many images and boxes, and empty image files of the right
names. Every measurement runs in a process of its own.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from conf.entry import compose
from conf.schema import TrainConfig
from data import Annotations, DataConfig, open_annotations
from train_utils.memory.out_of_memory import process_peak

FILES_PER_FOLDER = 10_000
WORKERS = (1, 8)
MEMORY_ROWS = Path("/proc/self/smaps_rollup")


def write_set(folder: Path, images: int, boxes: int) -> None:
    """The json, written entry by entry, and the image files, all hard links of one."""
    generator = np.random.default_rng(0)
    owners = np.sort(generator.integers(images, size=boxes))
    folder.mkdir(parents=True)
    sources = []
    with (folder / "instances.json").open("w") as file:
        file.write('{"images": [')
        for number in range(images):
            name = f"{number // FILES_PER_FOLDER:05d}/{number:012d}.jpg"
            if number % FILES_PER_FOLDER == 0:
                (folder / name).parent.mkdir()
                (folder / name).touch()
                sources.append(folder / name)
            else:
                os.link(sources[-1], folder / name)
            entry = {"id": number + 1, "file_name": name, "height": 480, "width": 640}
            file.write((", " if number else "") + json.dumps(entry))
        file.write('], "annotations": [')
        for start in range(0, boxes, 100_000):
            part = owners[start : start + 100_000]
            corners = generator.uniform((0, 0, 2, 2), (300, 200, 300, 200), (len(part), 4)).round(2)
            classes = generator.integers(80, size=len(part))
            for row, (owner, box, kind) in enumerate(
                zip(part.tolist(), corners.tolist(), classes.tolist(), strict=True)
            ):
                entry = {
                    "id": start + row + 1,
                    "image_id": owner + 1,
                    "category_id": kind + 1,
                    "bbox": box,
                    "iscrowd": 0,
                }
                entry |= {"area": round(box[2] * box[3], 2)}
                file.write((", " if start + row else "") + json.dumps(entry))
        categories = [{"id": number + 1, "name": f"class {number}"} for number in range(80)]
        file.write(f'], "categories": {json.dumps(categories)}}}')


def build(config: DataConfig) -> dict[str, float]:
    """Seconds and peak memory of the first opening, which builds."""
    before = process_peak() or 0
    started = time.perf_counter()
    open_annotations(config, "train")
    seconds = time.perf_counter() - started
    return {"build_seconds": seconds, "peak_gib": (process_peak() or 0) / 2**30, "before_gib": before / 2**30}


def reopen(config: DataConfig) -> dict[str, float]:
    """Seconds of a later opening."""
    started = time.perf_counter()
    open_annotations(config, "train")
    return {"open_seconds": time.perf_counter() - started}


class Walk(Dataset[int]):
    """Reads the boxes of every image that it is asked for; gives the worker's own memory after the
    last.
    """

    def __init__(self, annotations: Annotations) -> None:
        self.annotations = annotations

    def __len__(self) -> int:
        return len(self.annotations)

    def __getitems__(self, indices: list[int]) -> list[int]:
        for index in indices:
            self.annotations.training_boxes(index)
            self.annotations.file_name(index)
        return [private_bytes()]


def walk(config: DataConfig, workers: int, share: float) -> dict[str, float]:
    """Private memory of the largest worker after ``share`` of the data set was read by every one of
    them.
    """
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores, on purpose
    annotations = open_annotations(config, "train")
    count = int(share * len(annotations))
    batches: list[Any] = [range(start, min(start + 1000, count)) for start in range(0, count, 1000)]
    batches = [batch for batch in batches for _ in range(workers)]  # round robin: each worker gets them all
    loader = DataLoader(
        Walk(annotations), batch_sampler=batches, num_workers=workers, collate_fn=max, multiprocessing_context="fork"
    )
    last = list(loader)[-workers:]
    return {"worker_mib": max(last) / 2**20}


def private_bytes() -> int:
    """Memory of this process alone: pages that it wrote to. Those of mapped files are the system's
    to drop.
    """
    rows = MEMORY_ROWS.read_text().splitlines()
    return sum(int(row.split()[1]) * 1024 for row in rows if row.startswith("Private_Dirty"))


def alone(function: Callable[..., dict[str, float]], *arguments: object) -> dict[str, float]:
    """The result of a function in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # its processes may have children
        return pool.submit(function, *arguments).result()


def main(arguments: list[str]) -> None:
    """Measure and print."""
    if not MEMORY_ROWS.exists():
        sys.exit(f"error: there is no {MEMORY_ROWS} to tell the memory of workers. fix: measure on Linux")
    values = dict(argument.split("=", 1) for argument in arguments)
    folder, images, boxes = Path(values["folder"]), int(values["images"]), int(values["boxes"])
    if not folder.exists():
        write_set(folder, images, boxes)
    overrides = [f"data.root={folder}", f"data.index_dir={folder}/index"]
    overrides += ["data.train.annotations=instances.json", "data.train.images=."]
    config = replace(compose("train", TrainConfig, ["data=coco", *overrides]).data, names=None)
    size = (folder / "instances.json").stat().st_size
    print(f"{images:,} images, {boxes:,} boxes, json of {size / 2**20:,.0f} MiB, torch {torch.__version__}")
    for measure in (build, reopen, reopen):
        show(measure.__name__, alone(measure, config))
    for workers in WORKERS:
        for share in (0.1, 1.0):
            show(f"{workers} worker(s), {share:.0%} of the images", alone(walk, config, workers, share))


def show(name: str, found: dict[str, float]) -> None:
    """Print one measurement."""
    print(name, *(f"{key} {value:.3f}" for key, value in found.items()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
