"""Exported files find what Postprocess finds, in pictures with none to hundreds of boxes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models import Darknet, Postprocess, parse_cfg
from models.export import DetectorGraph, FixedSuppression, run_onnx, run_torch, write_onnx, write_torch

CELL = 16
ANY_SHAPE = {0: "batch", 2: "height", 3: "width"}
ROOM: dict[str, Any] = {"nms_iou": 0.45, "max_detections": 300, "candidates": 1000}
SHOWN: list[int | str] = ["black", 1, 2, "white", 3, "grey", "noise", 40, 0]
SUFFIX = {"onnx": "onnx", "torch": "pt2"}
Found = Callable[[Tensor], tuple[Tensor, ...]]

# A network whose boxes are known: every bright cell has two, the second one inside the first, of
# the class that is the cell's strongest colour. With both suppressed into one, there are as many
# detections as bright cells.
CELLS = f"""[net]
width=64
height=64
channels=3
[convolutional]
filters=16
size={CELL}
stride={CELL}
pad=0
activation=linear
[yolo]
mask=0,1
anchors=14,14, 12,12
classes=3
num=2
"""


def cell_detector() -> Darknet:
    model = Darknet(parse_cfg(CELLS, "cells.cfg")).eval()
    convolution = model.head_convolution(model.heads[0]).conv
    assert convolution.bias is not None
    with torch.no_grad():
        weight = torch.zeros(2, 8, 3, CELL, CELL)
        weight[:, 4] = 12 / (3 * CELL**2)  # objectness grows with the mean brightness, which is 0.5 where it is even
        weight[1, 4] *= 0.99  # no ties within a cell
        for colour in range(3):
            weight[:, 5 + colour, colour] = 6 / CELL**2
        bias = torch.zeros(2, 8)
        bias[:, 4] = -7
        convolution.weight.copy_(weight.flatten(0, 1))
        convolution.bias.copy_(bias.flatten())
    return model


def picture(height: int, width: int, bright: int | str) -> Tensor:
    """(3, height, width): a grey level, noise, or black with this many bright cells in colours."""
    if bright == "noise":
        return torch.rand(3, height, width, generator=torch.Generator().manual_seed(3))
    if isinstance(bright, str):
        return torch.full((3, height, width), {"black": 0.0, "grey": 0.5, "white": 1.0}[bright])
    image = torch.zeros(3, height, width)
    columns = width // CELL
    for number in range(bright):
        row, column = divmod(number * 7 % (columns * (height // CELL)), columns)
        cell = image[:, row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]
        cell[:] = torch.tensor([0.7 + 0.002 * number, 0.9, 0.8]).roll(number)[:, None, None]
    return image


def assert_found(run: Found, network: Darknet, images: Tensor, room: FixedSuppression) -> list[int]:
    """What a file finds in a batch equals Postprocess of the network; returns the counts."""
    postprocess = Postprocess(
        network.heads, room.confidence, room.nms_iou, room.max_detections, multi_label=False, candidates=room.candidates
    )
    with torch.no_grad():
        expected = postprocess(network(images))
    boxes, scores, classes, counts = run(images)
    assert counts.tolist() == [len(rows) for rows in expected]
    for image, rows in enumerate(expected):
        count, side = len(rows), max(images.shape[2:])
        assert not boxes[image, count:].any() and not scores[image, count:].any() and not classes[image, count:].any()
        ours = torch.cat((boxes[image], scores[image, :, None], classes[image, :, None].float()), dim=1)[:count]
        # Scores that differ in the last digit only may be in another order.
        assert (ours[:, 4] - rows[:, 4]).abs().le(1e-5).all()
        alike = ((ours[:, None] - rows) / torch.tensor([side, side, side, side, 1, 1])).abs().amax(-1) < 1e-5
        assert not count or (alike.any(0).all() and alike.any(1).all())
    found: list[int] = counts.tolist()
    return found


def write(folder: Path, file_format: str, model: Darknet, example: Tensor, open_axes: bool, confidence: float) -> Found:
    """Write a file with suppression and open it."""
    graph = DetectorGraph(model, FixedSuppression(confidence, **ROOM))
    path, axes = folder / f"file.{file_format}", ANY_SHAPE if open_axes else {}
    if file_format == "onnx":
        write_onnx(graph, example, axes, 20, {}, path)
        return run_onnx(path)
    write_torch(graph, example, axes, {}, path)
    return run_torch(path)


@pytest.mark.parametrize(
    ("file_format", "open_axes", "confidence"),
    [("torch", False, confidence) for confidence in (0.25, 0.0)]
    + [("torch", True, confidence) for confidence in (0.25, 0.9, 0.0)]
    + [("onnx", False, 0.25), ("onnx", True, 0.25), ("onnx", True, 0.0)],
)
def test_any_number_of_boxes(file_format: str, open_axes: bool, confidence: float, tmp_path: Path) -> None:
    """Batches of one and of three in files of that shape and in files with dynamic shapes.

    With dynamic shapes the images go down to one stride.
    """
    model = cell_detector()
    height, width = 9 * CELL, 13 * CELL
    batch = 1 if open_axes or confidence == 0.25 else 3
    run = write(tmp_path, file_format, model, torch.zeros(batch, 3, height, width), open_axes, confidence)
    other_shapes = [(4, height, width), (2, CELL, CELL), (1, 3 * CELL, CELL)] if open_axes else []
    for count, rows, columns in [(batch, height, width), *other_shapes]:
        for start in range(0, len(SHOWN), count):
            kinds = (SHOWN + SHOWN)[start : start + count]
            images = torch.stack([picture(rows, columns, kind) for kind in kinds])
            counts = assert_found(run, model, images, FixedSuppression(confidence, **ROOM))
            if confidence == 0.25 and rows == height:
                known = {"black": 0, "white": 9 * 13, "grey": 9 * 13} | {kind: kind for kind in (0, 1, 2, 3, 40)}
                assert all(known.get(kind, found) == found for kind, found in zip(kinds, counts, strict=True))


@pytest.mark.parametrize("nms_iou", [0.0, 1.0])
@pytest.mark.parametrize("confidence", [0.0, 0.5, 1.0])
def test_suppression_at_the_ends_of_its_options(confidence: float, nms_iou: float) -> None:
    model = cell_detector()
    room = FixedSuppression(confidence, nms_iou, 300, 300)
    images = torch.stack([picture(6 * CELL, 5 * CELL, kind) for kind in SHOWN])
    assert_found(DetectorGraph(model, room), model, images, room)
