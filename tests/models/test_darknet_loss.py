"""Darknet's loss against a plain-Python reference of its gradients, and its invariances."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models import Darknet, DarknetLoss, Head, IouKind, zoo_cfg
from models.boxes import cxcywh_to_xyxy
from models.decode import decode
from models.heads import DarknetLossKeys
from tests.models.darknet_loss_reference import darknet

ANCHORS = ((10.0, 14.0), (23.0, 27.0), (37.0, 40.0), (40.0, 30.0), (60.0, 90.0), (100.0, 80.0))
SIZE = (96, 128)  # height, width: no square, because Darknet's units are those of the image


def make_heads(scale_x_y: float = 1.0, new_coords: bool = False, **keys: Any) -> list[Head]:
    """Two heads; anchor 3 belongs to both, anchor 0 to none."""
    return [
        Head(
            layer=layer,
            stride=stride,
            anchors=tuple(ANCHORS[index] for index in mask),
            num_classes=3,
            scale_x_y=scale_x_y,
            new_coords=new_coords,
            all_anchors=ANCHORS,
            mask=mask,
            darknet_loss=DarknetLossKeys(**keys),
        )
        for layer, stride, mask in ((2, 32, (3, 4, 5)), (5, 16, (1, 2, 3)))
    ]


# As in the .cfg files of these networks, with thresholds that random maps reach.
CASES: dict[str, list[Head]] = {
    "yolov3": make_heads(ignore_thresh=0.4),
    "yolov3-giou": make_heads(iou_loss=IouKind.giou, iou_normalizer=0.5, ignore_thresh=0.4),
    "yolov4": make_heads(1.1, iou_loss=IouKind.ciou, iou_normalizer=0.07, iou_thresh=0.213, ignore_thresh=0.4),
    "yolov4-mse": make_heads(1.2, iou_normalizer=0.07, iou_thresh=0.213, label_smooth_eps=0.1),
    "yolov4-csp": make_heads(
        2.0, True, iou_loss=IouKind.ciou, iou_normalizer=0.05, iou_thresh=0.2, cls_normalizer=0.5, obj_normalizer=4.0
    ),
    "new_coords-mse": make_heads(2.0, True, ignore_thresh=0.4),
    "iou": make_heads(iou_loss=IouKind.iou, label_smooth_eps=0.2),
    "diou": make_heads(iou_loss=IouKind.diou, iou_thresh=0.3),
    "truth_thresh": make_heads(iou_loss=IouKind.giou, ignore_thresh=0.3, truth_thresh=0.35, iou_thresh=0.5),
}


def random_maps(batch: int, heads: list[Head]) -> list[Tensor]:
    return [
        torch.randn(batch, len(head.anchors), SIZE[0] // head.stride, SIZE[1] // head.stride, 5 + head.num_classes)
        - torch.tensor([0, 0, 0, 0, 1] + [2] * head.num_classes)
        for head in heads
    ]


def random_targets(count: int, batch: int) -> Tensor:
    """Targets of all sizes, some meeting in one cell, one centred on the far edge of the image."""
    targets = torch.rand(count, 6) * torch.tensor([batch, 3, SIZE[1], SIZE[0], 90, 80]) + torch.tensor(
        [0, 0, 0, 0, 4, 4]
    )
    targets[:, :2] = targets[:, :2].floor()
    targets[0, 2:4] = torch.tensor([SIZE[1], SIZE[0]])
    targets[-1] = targets[-2] + torch.tensor([0, 0, 0.1, 0.1, 3, 2])
    targets[-3] = targets[-2] + torch.tensor([0, 0, 0.1, -0.1, 2, 3])
    targets[-3, 1] = (targets[-2, 1] + 1) % 3
    return targets[torch.randperm(count)]


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_darknets_and_losses_the_reference(name: str) -> None:
    heads = CASES[name]
    maps, targets = [raw.requires_grad_() for raw in random_maps(3, heads)], random_targets(40, 3)
    parts = DarknetLoss(heads)(maps, targets)
    parts.total.backward()
    expected = darknet([raw.detach().numpy() for raw in maps], targets.tolist(), heads, SIZE)

    torch.testing.assert_close(torch.stack(parts[1:]), torch.tensor(expected.losses).float() / 3, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(parts.total, sum(parts[1:]))
    for raw, delta in zip(maps, expected.deltas, strict=True):
        np.testing.assert_allclose(-raw.grad.numpy() * 3, delta, rtol=1e-3, atol=1e-4)
    for rule in ("left out", "not recognised", "best", "several classes"):
        assert expected.seen[rule], f"no {rule} in this case"
    assert (expected.seen["alike"] > 0) == (heads[0].darknet_loss.iou_thresh < 1)
    assert (expected.seen["by overlap"] > 0) == (heads[0].darknet_loss.truth_thresh < 1)


def test_a_network_of_a_cfg_brings_its_keys() -> None:
    heads = Darknet(zoo_cfg("yolov3-tiny"), num_classes=3, width=0.125).heads
    maps, targets = random_maps(2, heads), random_targets(20, 2)
    keys = DarknetLossKeys(iou_loss=None, ignore_thresh=0.7, truth_thresh=1.0, iou_normalizer=0.75)
    same = [replace(head, darknet_loss=keys) for head in heads]
    assert DarknetLoss(heads)(maps, targets) == DarknetLoss(same)(maps, targets)


def test_no_targets_is_background_only() -> None:
    for heads in CASES.values():
        maps = [raw.requires_grad_() for raw in random_maps(2, heads)]
        parts = DarknetLoss(heads)(maps, torch.zeros(0, 6))
        assert parts.box == 0 and parts.classification == 0 and parts.objectness > 0
        parts.total.backward()
        for raw in maps:
            assert (raw.grad[..., 4] > 0).all() and (raw.grad[..., :4] == 0).all() and (raw.grad[..., 5:] == 0).all()


def test_order_of_targets_does_not_matter() -> None:
    for heads in CASES.values():
        maps, targets = random_maps(2, heads), random_targets(60, 2)
        loss = DarknetLoss(heads)
        torch.testing.assert_close(loss(maps, targets).total, loss(maps, targets.flip(0)).total)


@pytest.mark.parametrize("name", ["yolov3", "yolov4-csp", "truth_thresh"])
def test_the_ranks_shares_add_up_to_the_whole_batch(name: str) -> None:
    heads = CASES[name]
    maps, targets = [raw.requires_grad_() for raw in random_maps(4, heads)], random_targets(30, 4)
    targets[:, 0] = torch.where(torch.arange(30) < 27, targets[:, 0] % 2, targets[:, 0] % 2 + 2)  # 27 on rank 0, 3 on 1
    loss = DarknetLoss(heads)
    whole = loss(maps, targets)
    gradients = torch.autograd.grad(whole.total, maps)
    shares = [
        ([raw[:2] for raw in maps], targets[targets[:, 0] < 2]),
        ([raw[2:] for raw in maps], targets[targets[:, 0] >= 2] - torch.tensor([2.0, 0, 0, 0, 0, 0])),
    ]
    counts: list[Tensor] = []

    def all_reduce(count: Tensor) -> Tensor:
        counts.append(count)
        return count * 2  # both ranks hold equally many images

    totals = [loss(*share, sum_over_ranks=all_reduce, world_size=2).total for share in shares]
    assert [count.tolist() for count in counts] == [[2], [2]]  # one call each
    total = totals[0] + totals[1]
    torch.testing.assert_close(total, whole.total)
    for one, other in zip(torch.autograd.grad(total, maps), gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_rank_without_targets_still_joins_the_sum() -> None:
    calls = []
    heads = CASES["yolov3"]
    DarknetLoss(heads)(
        random_maps(3, heads), torch.zeros(0, 6), sum_over_ranks=lambda x: (calls.append(x.tolist()), x)[1]
    )
    assert calls == [[3]]


def test_memory_stays_bounded_by_comparing_few_targets_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for heads in CASES.values():
        maps, targets = random_maps(2, heads), random_targets(30, 2)
        loss = DarknetLoss(heads)
        at_once = loss(maps, targets)
        monkeypatch.setattr("models.assignment.PAIRS_AT_ONCE", 100)
        assert loss(maps, targets) == at_once
        monkeypatch.undo()


@pytest.mark.parametrize("name", CASES)
def test_maps_that_decode_to_the_target_have_no_box_loss(name: str) -> None:
    """The loss and decode.py mean the same box, with scale_x_y and new_coords."""
    box = torch.tensor([70.0, 45.0, 38.0, 29.0])  # most like anchor 3, which both heads have
    heads = [replace(head, darknet_loss=replace(head.darknet_loss, label_smooth_eps=0)) for head in CASES[name]]
    maps = [torch.full_like(raw, -20) for raw in random_maps(1, heads)]
    for raw, head in zip(maps, heads, strict=True):
        cell = (box[:2] / head.stride).floor()
        raw[0, :, int(cell[1]), int(cell[0]), 4:6] = 20
        offset = (box[:2] / head.stride - cell + (head.scale_x_y - 1) / 2) / head.scale_x_y
        size = box[2:] / torch.tensor(head.anchors)
        raw_size = (size.sqrt() / 2).logit() if head.new_coords else size.log()
        raw[0, :, int(cell[1]), int(cell[0]), :4] = torch.cat((offset.logit().expand(3, 2), raw_size), 1)
    parts = DarknetLoss(heads)(maps, torch.cat((torch.zeros(2), box))[None])
    assert parts.box.abs() < 1e-5 and parts.classification < 1e-5
    boxes, scores = decode(maps, heads)
    found = boxes[0][scores[0, :, 0] > 0.5]
    torch.testing.assert_close(found, cxcywh_to_xyxy(box).expand(6, 4), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_gradients_stay_finite(name: str, scale: float) -> None:
    maps = [(raw * scale).requires_grad_() for raw in random_maps(2, CASES[name])]
    parts = DarknetLoss(CASES[name])(maps, random_targets(50, 2))
    parts.total.backward()
    assert parts.total.isfinite() and all(raw.grad.isfinite().all() for raw in maps)


def test_half_precision_maps_are_computed_in_float32() -> None:
    heads = CASES["yolov4"]
    maps, targets = [raw.bfloat16() for raw in random_maps(2, heads)], random_targets(20, 2)
    loss = DarknetLoss(heads)
    with torch.autocast("cpu", torch.bfloat16):
        parts = loss(maps, targets)
    assert parts.total.dtype == torch.float32
    assert parts.total.equal(loss([raw.float() for raw in maps], targets).total)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_a_step_never_waits_for_the_accelerator(name: str) -> None:
    heads = CASES[name]
    maps, targets = random_maps(4, heads), random_targets(50, 4)
    loss = DarknetLoss(heads)
    on_cpu = loss(maps, targets)
    maps, targets = [raw.cuda().requires_grad_() for raw in maps], targets.cuda()
    loss(maps, targets)  # copies the anchors to the device, once
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = loss(maps, targets)
        again.total.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(again.total.cpu(), on_cpu.total, rtol=1e-4, atol=1e-5)


def test_a_positive_by_overlap_whose_object_is_centred_elsewhere_has_a_finite_squared_error() -> None:
    heads = make_heads(ignore_thresh=0.4, truth_thresh=0.2)
    maps, targets = [raw.requires_grad_() for raw in random_maps(2, heads)], random_targets(60, 2)
    parts = DarknetLoss(heads)(maps, targets)
    parts.total.backward()
    assert parts.box.isfinite() and all(raw.grad.isfinite().all() for raw in maps)
