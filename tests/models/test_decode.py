"""Decoding by formula; suppression against torchvision and a plain loop, also as on a GPU."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision import ops

from models import Head, IouKind, ModelError, Postprocess
from models import decode as decoding
from models.decode import box_iou_aligned, decode, nms_at_once
from tests.test_host_reads import HostReads

HEADS = [
    Head(layer=1, stride=32, anchors=((40, 30), (60, 90)), num_classes=4, scale_x_y=1.1),
    Head(layer=3, stride=16, anchors=((10, 14), (23, 27)), num_classes=4),
]


def random_maps(batch: int) -> list[Tensor]:
    return [torch.randn(batch, 2, 96 // head.stride, 128 // head.stride, 9) * 1.5 for head in HEADS]


def postprocess(**changes: float) -> Postprocess:
    options = {"confidence": 0.05, "nms_iou": 0.5, "max_detections": 10000, "multi_label": True} | changes
    return Postprocess(HEADS, **options)


def random_boxes(count: int) -> torch.Tensor:
    low = torch.rand(count, 2) * 80
    return torch.cat((low, low + 1 + torch.rand(count, 2) * 60), dim=1)


TORCHVISION = {
    IouKind.giou: ops.generalized_box_iou_loss,
    IouKind.diou: ops.distance_box_iou_loss,
    IouKind.ciou: ops.complete_box_iou_loss,
}


@pytest.mark.parametrize("kind", TORCHVISION)
def test_overlaps_and_gradients_equal_torchvisions(kind: IouKind) -> None:
    targets, ours = random_boxes(200), random_boxes(200).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    loss, reference = 1 - box_iou_aligned(ours, targets, kind), TORCHVISION[kind](theirs, targets)
    torch.testing.assert_close(loss, reference, rtol=1e-4, atol=1e-5)
    loss.sum().backward()
    reference.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", IouKind)
def test_degenerate_boxes_stay_finite_and_half_precision_becomes_float32(kind: IouKind) -> None:
    point = torch.tensor([[5.0, 5, 5, 5], [0, 0, 0, 10], [0, 0, 1e-20, 1e-20]], requires_grad=True)
    overlap = box_iou_aligned(point, torch.tensor([[5.0, 5, 5, 5], [0, 0, 10, 0], [0, 0, 10, 10]]), kind)
    overlap.sum().backward()
    assert overlap.isfinite().all() and point.grad is not None and point.grad.isfinite().all()
    one, other = random_boxes(20).half(), random_boxes(20).half()
    assert box_iou_aligned(one, other, kind).equal(box_iou_aligned(one.float(), other.float(), kind))


def test_boxes_and_scores_by_formula() -> None:
    maps = random_maps(2)
    boxes, scores = decode(maps, HEADS)
    position = 0
    for raw, head in zip(maps, HEADS, strict=True):
        reach = (head.scale_x_y - 1) / 2
        for anchor, row, column in np.ndindex(*raw.shape[1:4]):
            x, y, w, h, objectness, *classes = raw[1, anchor, row, column].tolist()
            sigmoid = [1 / (1 + math.exp(-value)) for value in (x, y, objectness, *classes)]
            cx = (column + sigmoid[0] * head.scale_x_y - reach) * head.stride
            cy = (row + sigmoid[1] * head.scale_x_y - reach) * head.stride
            width, height = (math.exp(v) * side for v, side in zip((w, h), head.anchors[anchor], strict=True))
            corners = [cx - width / 2, cy - height / 2, cx + width / 2, cy + height / 2]
            assert boxes[1, position].tolist() == pytest.approx(corners, rel=1e-4, abs=1e-3)
            assert scores[1, position].tolist() == pytest.approx([sigmoid[2] * p for p in sigmoid[3:]], rel=1e-5)
            position += 1
    assert position == boxes.shape[1] == scores.shape[1]


def test_half_precision_maps_decode_in_float32_and_huge_ones_stay_finite() -> None:
    boxes, scores = decode([(raw * 1e4).bfloat16() for raw in random_maps(1)], HEADS)
    assert boxes.dtype == scores.dtype == torch.float32 and boxes.isfinite().all() and scores.isfinite().all()


@pytest.mark.parametrize("multi_label", [True, False])
@pytest.mark.parametrize("nms_iou", [0.3, 0.6])
def test_equals_torchvisions_nms_of_each_class(multi_label: bool, nms_iou: float) -> None:
    maps = random_maps(3)
    boxes, scores = decode(maps, HEADS)
    results = postprocess(multi_label=multi_label, nms_iou=nms_iou)(maps)
    assert len(results) == 3 and all(len(result) > 20 for result in results)
    for image, result in enumerate(results):
        allowed = scores[image].clone()
        if not multi_label:
            allowed[allowed < allowed.amax(1, keepdim=True)] = 0
        rows, labels = (allowed > 0.05).nonzero().unbind(1)
        values = allowed[rows, labels]
        kept = ops.batched_nms(boxes[image, rows], values, labels, nms_iou)
        assert result.equal(torch.cat((boxes[image, rows[kept]], values[kept, None], labels[kept, None]), 1))


def test_only_scores_above_the_threshold_are_detections() -> None:
    maps = random_maps(1)
    threshold = float(decode(maps, HEADS)[1].max())
    assert postprocess(confidence=threshold)(maps)[0].shape == (0, 6)
    below = float(torch.nextafter(torch.tensor(threshold), torch.tensor(0.0)))
    assert postprocess(confidence=below)(maps)[0].shape == (1, 6)


def test_the_best_detections_are_kept() -> None:
    maps = random_maps(1)
    everything = postprocess()(maps)[0]
    assert (everything[:, 4].diff() <= 0).all()
    assert postprocess(max_detections=7)(maps)[0].equal(everything[:7])
    # The best candidates depend on each other only, so a cap removes nothing but the tail.
    few = postprocess(candidates=40)(maps)[0]
    assert 0 < len(few) <= 40 and few.equal(everything[: len(few)])


@pytest.mark.parametrize("options", [{}, {"multi_label": False}, {"merge": True}], ids=str)
def test_other_classes_take_no_place_and_change_nothing(monkeypatch, options) -> None:
    maps = random_maps(3)
    on_gpu_or_not = [lambda suppress: suppress(maps), lambda suppress: suppress.detect_at_once(maps)]
    everything = [rows[torch.isin(rows[:, 5], torch.tensor([1.0, 3.0]))] for rows in postprocess(**options)(maps)]
    for detect in on_gpu_or_not:
        for limits in ({}, {"max_detections": 5}, {"max_detections": 5, "candidates": 40}):
            chosen = detect(postprocess(**options, **limits, classes=[1, 3]))
            for rows, expected in zip(chosen, everything, strict=True):
                assert rows.equal(expected[: limits.get("max_detections")]) and len(rows) >= 5
        on_gpu(monkeypatch)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_maps_that_are_not_finite_are_an_error_and_never_nothing_found(value: str) -> None:
    maps = random_maps(2)
    maps[-1][1, 0, 0, 0, 0] = float(value)
    with pytest.raises(ModelError, match=r"not finite\. fix: "):
        postprocess()(maps)
    assert len(postprocess(refuse_nonfinite=False)(maps)) == 2


def test_equal_scores_keep_the_order_of_decode() -> None:
    maps = [torch.zeros_like(raw) for raw in random_maps(1)]
    result = postprocess(nms_iou=1.0)(maps)[0]
    boxes, _ = decode(maps, HEADS)
    assert result[:, :4].equal(boxes[0].repeat_interleave(4, dim=0))
    assert result[:8, 5].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_merged_box_is_the_weighted_mean_of_what_it_suppresses_and_itself() -> None:
    maps = random_maps(2)
    boxes, scores = decode(maps, HEADS)
    plain, merged = (postprocess(merge=merge, nms_iou=0.2, max_detections=9)(maps) for merge in (False, True))
    moved = 0
    for image, (before, after) in enumerate(zip(plain, merged, strict=True)):
        assert after[:, 4:].equal(before[:, 4:]), "which boxes stay, their scores and classes"
        for row, result in zip(before, after, strict=True):
            of_class = scores[image, :, int(row[5])].double()
            close = (ops.box_iou(row[None, :4], boxes[image])[0] > 0.2) & (of_class > 0.05)
            mean = (boxes[image, close].double() * of_class[close, None]).sum(0) / of_class[close].sum()
            assert result[:4].double().tolist() == pytest.approx(mean.tolist(), rel=1e-5, abs=1e-3)
            moved += int(close.sum() > 1)
    assert moved > 10


def test_merging_keeps_boxes_without_area_and_images_without_detections() -> None:
    maps = [raw - 200 for raw in random_maps(1)]
    assert postprocess(merge=True)(maps)[0].shape == (0, 6)
    maps[0][0, 0, 0, 0, 4:] = 9.0  # one detection whose width and height are exp(-200) anchors
    result = postprocess(merge=True, multi_label=False)(maps)[0]
    assert len(result) == 1 and result.isfinite().all()


def test_the_best_candidates_suffice_or_all_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two images whose best boxes lie upon one another, and one with many apart, give the same
    whether a look at the best is enough or not.
    """
    maps = random_maps(3)
    for raw in maps:
        raw[:2, :, 1:3, 1:3, :4], raw[:2, :, 1:3, 1:3, 4:] = -9.0, 5.0
        raw[:2, ..., 2:4] = 3.0
    looks = []
    for first_look in (1, 2, 10, 1000):
        monkeypatch.setattr("models.decode.FIRST_CANDIDATES", first_look)
        for multi_label in (True, False):
            looks.append(postprocess(max_detections=9, multi_label=multi_label)(maps))
            assert all(one.equal(other) for one, other in zip(looks[-1], looks[not multi_label], strict=True))
    assert [len(rows) for rows in looks[0]] == [9, 9, 9]


CROWDED_HEADS = [replace(head, num_classes=80) for head in HEADS]


def crowded_maps(batch: int) -> list[Tensor]:
    """Many boxes, some of equal score, some without area; the last image is empty."""
    maps = [torch.randn(batch, 2, 96 // head.stride, 128 // head.stride, 85) * 1.5 for head in CROWDED_HEADS]
    for raw in maps:
        raw[..., 4] += 1
        raw[..., 5:] = (raw[..., 5:] * 2).round() / 2 - 3
        raw[..., 0, 2:4] = -200.0
        raw[-1, ..., 4] = -200.0
    return maps


def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(boxes: Tensor, _: Tensor, groups: Tensor, iou: float) -> Tensor:
        return nms_at_once(boxes, groups, iou)

    monkeypatch.setattr(decoding, "nms_in_each_group", at_once)


@pytest.mark.parametrize(
    "options",
    [{}, {"multi_label": False}, {"merge": True}, {"max_detections": 5}, {"candidates": 90}, {"confidence": 0.3}],
    ids=str,
)
def test_a_batch_gives_what_its_images_give(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    maps = crowded_maps(4)
    postprocess = Postprocess(
        CROWDED_HEADS, **{"confidence": 0.06, "nms_iou": 0.5, "max_detections": 100, "multi_label": True} | options
    )
    alone = [rows.tolist() for rows in postprocess(maps)]
    assert [rows.tolist() for rows in postprocess.detect_at_once(maps)] == alone
    on_gpu(monkeypatch)
    for pairs in (2**16, 99):
        monkeypatch.setattr(decoding, "MAX_PAIRS", pairs)
        assert [rows.tolist() for rows in postprocess.detect_at_once(maps)] == alone
    assert min(map(len, alone[:-1])) >= 5 and not alone[-1]


@pytest.mark.parametrize("limit", [0.0, 0.3, 0.5, 0.6])
def test_all_pairs_at_once_leave_torchvisions_boxes(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MAX_PAIRS", 999)
    chain = torch.arange(40.0)[:, None] + torch.tensor([0.0, 0, 3, 3])
    low = torch.randint(9, (300, 2)).float()
    boxes = torch.cat((chain, torch.cat((low, low + torch.randint(6, (300, 2))), 1)))
    falling, classes = torch.ones(340).cumsum(0).flip(0), torch.randint(3, (340,))
    for groups in (classes, torch.zeros_like(classes)):
        expected = ops.batched_nms(boxes, falling, groups, limit)
        assert nms_at_once(boxes, groups, limit).equal(expected.sort().values)
    assert nms_at_once(boxes[:0], classes[:0], limit).tolist() == []


@pytest.mark.parametrize(
    ("kind", "nms_iou", "reads", "launches"),
    [("dense", 0.5, 6, 190), ("no box", 0.5, 4, 160), ("few classes", 0.5, 6, 190),
     ("chosen classes", 0.5, 6, 190), ("few classes", 0.0, 11, 330)],
)  # fmt: skip
def test_the_host_waits_few_times_for_a_batch(monkeypatch, kind, nms_iou, reads, launches) -> None:
    """The last one needs both looks at its candidates. The network adds no wait: test_detect.py."""
    on_gpu(monkeypatch)
    monkeypatch.setattr(decoding, "FIRST_CANDIDATES", 1)
    classes = [3, 7] if kind == "chosen classes" else None
    postprocess = Postprocess(CROWDED_HEADS, 0.02, nms_iou, max_detections=70, multi_label=not classes, classes=classes)
    maps = crowded_maps(2)
    for raw in maps:
        if kind == "few classes":
            raw[..., 8:] = -200.0
        if kind == "no box":
            raw[..., 4] = -200.0
    postprocess.detect_at_once(maps)
    with torch.inference_mode(), HostReads() as counted:
        postprocess.detect_at_once(maps)
    assert counted.reads.total() == reads and not counted.copies, counted
    assert counted.launches.total() <= launches, counted
