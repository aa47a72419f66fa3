"""Check a data set before a training on it costs anything; the data set is only read.

    python -m scripts.check_data data=bccd model=yolov3-tiny image_size=320
    python -m scripts.check_data --config-dir ~/mine data=cats out=report

Prints a report and writes it to a folder, as report.txt and labels.jpg, some images with their
boxes. Exit code 0: no problems, 1: some, 2: no such data set or option.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.programs import run

    run("check_data")
    raise SystemExit

import sys
import time
from pathlib import Path

import numpy as np
import torch

from conf.build.network import load_network
from conf.failures import ConfigError
from conf.schema_tools import CheckDataConfig
from data import ImageSource, OnError
from data.audit.check import CheckedSet, check_dataset, text_report
from models import Darknet
from train_utils.draw import Cell, save_sheet

COLUMNS = 4  # of the sheet


def check(config: CheckDataConfig) -> CheckedSet:
    """Check the set, print the report and write it with the sheet."""
    with torch.device("meta"):  # neither memory nor random numbers
        model = Darknet(load_network(config.model), width=config.model.width)
    anchors = np.array(sorted({anchor for head in model.heads for anchor in head.anchors}))  # some .cfg have more
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    out = Path(config.out) if config.out is not None else Path("runs", "check_data", f"{config.data.name}_{stamp}")
    try:  # before anything is read
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={out} cannot be created ({error.strerror}). fix: name another folder") from error
    checked = check_dataset(config.data, config.image_size, anchors, config.min_iou)
    cells = [
        labelled(checked, split, index)
        for split, readable in checked.readable.items()
        for index in readable[:: max(1, len(readable) // max(1, config.pictures))][: config.pictures]
    ]
    if cells:
        save_sheet(cells, COLUMNS, out / "labels.jpg")
    lines = [f"{config.data.name}: {config.data.root}", *text_report(checked)]
    (out / "report.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines[:-1]))
    print(f"{lines[-1]}, report: {out / 'report.txt'}")
    return checked


def labelled(checked: CheckedSet, split: str, index: int) -> Cell:
    """An image with its boxes, under its file name."""
    annotations = checked.splits[split]
    image = ImageSource(annotations, OnError.stop).read(index)
    assert image is not None  # with stop it raises
    classes, boxes = annotations.training_boxes(index)
    return Cell(image, boxes, classes, annotations.names, None, f"{split}: {annotations.file_name(index)}")


def main(config: CheckDataConfig) -> None:
    """Check the data set; exit with code 1 if there are problems."""
    if check(config).num_problems:
        sys.exit(1)
