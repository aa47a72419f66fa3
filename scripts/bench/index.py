"""Building and opening the index of a large COCO json: seconds, and memory of loader workers.

    python -m scripts.bench.index images=118287 boxes=860001 folder=/tmp/index_bench

The data set is made up: a json with that many images and boxes, and empty image files. Each
measurement runs in a fresh process.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # before torch is imported
    print(__doc__)
    raise SystemExit

import json
import os
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from conf.entry import compose
from conf.schema import TrainConfig
from data import Annotations, DataConfig, open_annotations
from scripts.bench.rounds import in_fresh_process, seconds_of
from train_utils.memory import process_peak

FILES_PER_FOLDER = 10_000
PART = 100_000  # boxes written at once
CLASSES = 80
WORKERS = (1, 8)
MEMORY_ROWS = Path("/proc/self/smaps_rollup")


def write_set(folder: Path, images: int, boxes: int) -> None:
    """Write the json, part by part, and the image files, which are hard links of one per folder."""
    generator = np.random.default_rng(0)
    owners = np.sort(generator.integers(1, images + 1, size=boxes))
    names = [f"{number // FILES_PER_FOLDER:05d}/{number:012d}.jpg" for number in range(images)]
    for number, name in enumerate(names):
        first = folder / names[number - number % FILES_PER_FOLDER]
        if folder / name == first:
            first.parent.mkdir(parents=True)
            first.touch()
        else:
            os.link(first, folder / name)

    def annotations(start: int) -> list[dict[str, Any]]:
        part = owners[start : start + PART]
        corners = generator.uniform((0, 0, 2, 2), (300, 200, 300, 200), (len(part), 4)).round(2)
        kinds = generator.integers(1, CLASSES + 1, size=len(part))
        rows = enumerate(zip(part.tolist(), kinds.tolist(), corners.tolist(), strict=True), start + 1)
        return [
            {"id": number, "image_id": owner, "category_id": kind, "bbox": box, "iscrowd": 0, "area": box[2] * box[3]}
            for number, (owner, kind, box) in rows
        ]

    sizes = {"height": 480, "width": 640}
    sections: dict[str, Iterable[list[dict[str, Any]]]] = {
        "images": [[{"id": number, "file_name": name} | sizes for number, name in enumerate(names, 1)]],
        "annotations": map(annotations, range(0, boxes, PART)),
        "categories": [[{"id": number, "name": f"class {number}"} for number in range(1, CLASSES + 1)]],
    }
    with (folder / "instances.json").open("w") as file:
        for number, (section, parts) in enumerate(sections.items()):
            file.write(f'{"," if number else "{"}"{section}": [')
            for place, rows in enumerate(parts):
                file.write("," * (place > 0) + json.dumps(rows)[1:-1])
            file.write("]")
        file.write("}")


def build(config: DataConfig) -> dict[str, float]:
    """Seconds and peak memory of the first opening, which builds the index."""
    before = process_peak() or 0
    seconds = seconds_of(open_annotations, config, "train")
    return {"build_seconds": seconds, "peak_gib": (process_peak() or 0) / 2**30, "before_gib": before / 2**30}


def reopen(config: DataConfig) -> dict[str, float]:
    """Seconds of a later opening."""
    return {"open_seconds": seconds_of(open_annotations, config, "train")}


class Walk(Dataset[int]):
    """Read the boxes of images and return the private memory of the worker afterwards."""

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
    """Private memory of the largest worker after each read ``share`` of the data set."""
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
    """Memory of this process alone: pages that it wrote to, which the system cannot drop."""
    rows = MEMORY_ROWS.read_text().splitlines()
    return sum(int(row.split()[1]) * 1024 for row in rows if row.startswith("Private_Dirty"))


def main(arguments: list[str]) -> None:
    """Measure and print."""
    if not MEMORY_ROWS.exists():
        sys.exit(f"error: there is no {MEMORY_ROWS} to read the memory of workers from. fix: measure on Linux")
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
        show(measure.__name__, in_fresh_process(measure, config))
    for workers in WORKERS:
        for share in (0.1, 1.0):
            show(f"{workers} worker(s), {share:.0%} of the images", in_fresh_process(walk, config, workers, share))


def show(name: str, found: dict[str, float]) -> None:
    """Print one measurement."""
    print(name, *(f"{key} {value:.3f}" for key, value in found.items()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
