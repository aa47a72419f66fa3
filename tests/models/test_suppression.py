"""Suppression in one call for a batch, as on a GPU, against one call for each image and class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision import ops

from models import Head, Postprocess
from models import decode as decoding
from models.decode import REACH, nms_at_once, nms_in_each_group
from tests.host_reads import HostReads

HEADS = [
    Head(layer=1, stride=32, anchors=((40, 30), (60, 90)), num_classes=80, scale_x_y=1.1),
    Head(layer=3, stride=16, anchors=((10, 14), (23, 27)), num_classes=80),
]


def random_maps(batch: int) -> list[Tensor]:
    """Many boxes, some of equal score, some without area; the last image is empty."""
    generator = torch.Generator().manual_seed(0)
    maps = [
        torch.randn(batch, 2, 96 // head.stride, 128 // head.stride, 85, generator=generator) * 1.5 for head in HEADS
    ]
    for raw in maps:
        raw[..., 4] += 1
        raw[..., 5:] = (raw[..., 5:] * 2).round() / 2 - 3
        raw[..., 0, 2:4] = -200.0
        raw[-1, ..., 4] = -200.0
    return maps


def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the functions of a GPU on the CPU."""
    monkeypatch.setattr(decoding, "nms_in_each_group", lambda boxes, _, groups, iou: at_once(boxes, groups, iou))


def at_once(boxes: Tensor, groups: Tensor, iou: float) -> Tensor:
    return nms_at_once(boxes, groups // 80, groups % 80, iou)


@pytest.mark.parametrize(
    "options",
    [{}, {"multi_label": False}, {"merge": True}, {"max_detections": 5}, {"candidates": 90}, {"confidence": 0.3}],
    ids=str,
)
def test_a_batch_gives_what_its_images_give(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    maps = random_maps(4)
    postprocess = Postprocess(
        HEADS, **{"confidence": 0.06, "nms_iou": 0.5, "max_detections": 100, "multi_label": True} | options
    )
    alone = [rows.tolist() for rows in postprocess(maps)]
    assert [rows.tolist() for rows in postprocess.of_batch(maps)] == alone
    on_gpu(monkeypatch)
    for chunk in (2**16, 700, 1):
        monkeypatch.setattr(decoding, "CHUNK", chunk)
        assert [rows.tolist() for rows in postprocess.of_batch(maps)] == alone
    assert min(map(len, alone[:-1])) >= 5 and not alone[-1]


def clusters(count: int, spread: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Boxes (count, 4), each near one of ten, and their classes."""
    near = torch.randint(10, (count,), generator=generator)
    centres, sizes = (torch.rand(10, 2, generator=generator) * scale + scale / 8 for scale in (spread, spread / 4))
    jitter = torch.randn(count, 4, generator=generator) * 0.1
    centre, half = centres[near] + jitter[:, :2] * sizes[near], sizes[near] * jitter[:, 2:].exp() / 2
    return torch.cat((centre - half, centre + half), dim=1), near % 3


@pytest.mark.parametrize("spread", [6.0, 600.0, 2e5, 5e5])
def test_neighbours_and_places_change_nothing(spread: float) -> None:
    """Also where boxes are cut: the last spread reaches far beyond."""
    generator = torch.Generator().manual_seed(0)
    boxes, classes = clusters(300, spread, generator)
    boxes = torch.cat((boxes, boxes[:20], boxes.new_zeros(2, 4)))  # equal ones and such without area
    classes = torch.cat((classes, classes[:20], classes[:2]))
    alone = nms_at_once(boxes, torch.zeros_like(classes), classes, 0.6)
    assert 10 < len(alone) < len(boxes)
    for image, offset in ((3, 40), (63, 79), (2**16 - 1, 2**16 - 3)):
        images = torch.full_like(classes, image)
        assert nms_at_once(boxes, images, classes + offset, 0.6).equal(alone)
        crowd = torch.cat((boxes, boxes)), torch.cat((images, images - 1)), torch.cat((classes, classes)) + offset
        assert nms_at_once(*crowd, 0.6).tolist() == [*alone.tolist(), *(alone + len(boxes)).tolist()]
    if spread < REACH:
        ones = torch.ones(len(boxes))
        assert nms_in_each_group(boxes, ones.cumsum(0).flip(0), classes, 0.6).equal(alone)


@pytest.mark.parametrize("iou", [0.0, 0.5, 1.0])
def test_equal_overlaps_are_decided_as_by_torchvision(iou: float) -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 5], [10, 0, 20, 10], [0, 0, 10, 10], [5, 5, 5, 9]])
    expected = ops.nms(boxes, torch.arange(5, 0, -1).float(), iou).sort().values
    classes = torch.full((5,), 7)
    assert nms_at_once(boxes, classes, classes, iou).equal(expected)


def test_suppression_of_no_class_and_of_classes_with_gaps() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9], [0, 0, 10, 10], [1, 0, 10, 10]])
    scores, classes = torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([70, 3, 70, 3])
    for iou, kept in ((0.5, [0, 1]), (0.85, [0, 1, 3])):
        assert nms_in_each_group(boxes, scores, classes, iou).tolist() == kept
        assert nms_at_once(boxes, torch.zeros_like(classes), classes, iou).tolist() == kept
    assert nms_in_each_group(boxes[:0], scores[:0], classes[:0], 0.5).tolist() == []
    assert nms_at_once(boxes[:0], classes[:0], classes[:0], 0.5).tolist() == []


@pytest.mark.parametrize(
    ("kind", "nms_iou", "reads", "launches"),
    [("dense", 0.5, 3, 90), ("no box", 0.5, 3, 90), ("few classes", 0.5, 3, 90), ("few classes", 0.0, 5, 120)],
)
def test_the_host_waits_few_times_for_a_batch(
    monkeypatch: pytest.MonkeyPatch, kind: str, nms_iou: float, reads: int, launches: int
) -> None:
    """The last one needs both looks at its candidates. The network adds no wait: test_detect.py."""
    on_gpu(monkeypatch)
    monkeypatch.setattr(decoding, "FIRST_CANDIDATES", 1)
    postprocess = Postprocess(HEADS, confidence=0.02, nms_iou=nms_iou, max_detections=70, multi_label=True)
    maps = random_maps(2)
    for raw in maps:
        if kind == "few classes":
            raw[..., 8:] = -200.0
        if kind == "no box":
            raw[..., 4] = -200.0
    postprocess.of_batch(maps)
    with torch.inference_mode(), HostReads() as counted:
        postprocess.of_batch(maps)
    assert counted.reads.total() == reads and not counted.copies, counted
    assert counted.launches.total() <= launches, counted
