"""Check a data set before a training on it costs anything; the data set is only read.

    python -m scripts.check_data data=bccd model=yolov3-tiny image_size=320
    python -m scripts.check_data --config-dir ~/mine data=cats out=report

Prints the report and writes it to a folder: report.html (one page with all pictures), report.json,
report.txt. Exit code 0: no problems, 1: some, 2: no such data set or option.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.programs import run

    run("check_data")
    raise SystemExit

import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conf.build.network import load_network
from conf.failures import ConfigError
from conf.schema_tools import CheckDataConfig
from data import ImageSource, OnError, Request, TrainDataset
from data.audit.check import CheckedSet, Network, check_dataset
from data.audit.report import html_report, text_report, verdict
from models import Darknet
from train_utils.pictures.sheets import Cell, Group, draw_targets, save_sheet
from train_utils.terminal.progress import Progress

COLUMNS = 4  # of a sheet
PAIRS = 8  # of duplicate or similar images on their sheet


def check(config: CheckDataConfig) -> dict[str, Any]:
    """Print the report, write it with its pictures, and return what report.json holds."""
    network = network_of(config)
    out = open_out(config)

    with ExitStack() as stack:

        def progress(split: str, count: int) -> Callable[[int], None]:
            return stack.enter_context(Progress(count, f"decoding {split}", enabled=True)).advance

        checked = check_dataset(config.data, network, config.threads, progress)
    pictures = draw(config, checked, out) if config.pictures else []
    lines = text_report(checked.report)
    print("\n".join(lines[:-1]))
    text = json.dumps(checked.report, indent=1, allow_nan=False)
    (out / "report.json").write_text(text + "\n", encoding="utf-8")
    (out / "report.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (out / "report.html").write_text(html_report(checked.report, pictures), encoding="utf-8")
    print(f"{verdict(checked.report)}, report: {out / 'report.html'}")
    return checked.report


def network_of(config: CheckDataConfig) -> Network:
    """Strides and anchors of the network. Raises ModelError."""
    with torch.device("meta"):  # neither memory nor random numbers
        model = Darknet(load_network(config.model), width=config.model.width)
    strides = sorted({head.stride for head in model.heads})
    name = Path(config.model.cfg).stem
    anchors = sorted({anchor for head in model.heads for anchor in head.anchors})  # those in use: some .cfg have more
    return Network(name, config.image_size, strides, np.array(anchors), config.min_iou)


def open_out(config: CheckDataConfig) -> Path:
    """Create the folder for the report before anything is read. Raises ConfigError."""
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    out = Path(config.out) if config.out is not None else Path("runs", "check_data", f"{config.data.name}_{stamp}")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={out} cannot be created ({error.strerror}). fix: name another folder") from error
    return out


def draw(config: CheckDataConfig, checked: CheckedSet, out: Path) -> list[tuple[str, Path]]:
    """Draw all pictures into ``out``; return captions and files."""
    found = []
    generator = np.random.default_rng(config.seed)
    chosen = {split: pick(checked.readable[split], config.pictures, generator) for split in checked.splits}
    for split, indices in chosen.items():
        if indices:
            path = out / f"labels_{split}.jpg"
            save_sheet([Group([labelled(checked, split, i)]) for i in indices], COLUMNS, path)
            found.append((f"Labels of {split}, {len(indices)} images at random", path))
    if chosen["train"]:
        path = out / "train_batch.jpg"
        draw_augmented(config, checked, chosen["train"], path)
        found.append((f"A training batch, augmented, at {config.image_size} pixels", path))
    if checked.pairs:
        path = out / "pairs.jpg"
        pairs = [Group([labelled(checked, *place) for place in pair]) for pair in checked.pairs[:PAIRS]]
        save_sheet(pairs, COLUMNS // 2, path)
        found.append(("Duplicate or similar images, in pairs", path))
    return found


def pick(positions: list[int], count: int, generator: np.random.Generator) -> list[int]:
    """Choose up to ``count`` positions at random; return them in ascending order."""
    return sorted(generator.choice(positions, min(count, len(positions)), replace=False).tolist() if positions else [])


def labelled(checked: CheckedSet, split: str, index: int) -> Cell:
    """An image with its boxes, under its file name."""
    annotations = checked.splits[split]
    image = ImageSource(annotations, OnError.stop).read(index)
    assert image is not None  # with stop it raises
    classes, boxes = annotations.training_boxes(index)
    return Cell(image, boxes, classes, annotations.names, None, f"{split}: {annotations.file_name(index)}", "no box")


def draw_augmented(config: CheckDataConfig, checked: CheckedSet, indices: list[int], out: Path) -> None:
    """Save training samples of these images, as ``augment`` makes them."""
    annotations = checked.splits["train"]
    # Mosaics take their other images from a pool of readable ones: unreadable ones leave holes.
    pool = tuple(pick(checked.readable["train"], 100, np.random.default_rng(config.seed)))
    dataset = TrainDataset(annotations, config.augment, config.seed, 10**6, ImageSource(annotations, OnError.stop))
    side = config.image_size
    batch = dataset.__getitems__([Request(index, side, side, 0, pool=pool) for index in indices])
    images = (batch.network_input() * 255).round().byte()
    draw_targets(images.numpy(), batch.targets.numpy(), annotations.names, out, count=len(indices))


def main(config: CheckDataConfig) -> None:
    """Check the data set; exit with code 1 if there are problems."""
    if check(config)["num_problems"]:
        sys.exit(1)
