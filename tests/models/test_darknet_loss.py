"""Darknet's loss against a plain reference of its gradients; test_loss.py has its invariances."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models import Darknet, DarknetLoss, Head, IouKind, assignment, zoo_cfg
from models.heads import DarknetLossKeys
from tests.models.darknet_loss_reference import darknet

ANCHORS = ((40.0, 30.0), (23.0, 27.0), (60.0, 90.0), (10.0, 14.0), (60.0, 90.0), (100.0, 80.0))
SIZE = (96, 128)  # height, width: no square, because Darknet's units are those of the image


def make_heads(scale_x_y: float = 1.0, new_coords: bool = False, **keys: Any) -> list[Head]:
    """Two heads; anchor 0 belongs to both, anchor 3 to none, and 2 and 4 are equal."""
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
        for layer, stride, mask in ((2, 32, (0, 4, 5)), (5, 16, (1, 2, 0)))
    ]


# As in the .cfg files of these networks, with thresholds that random maps reach.
CASES: dict[str, list[Head]] = {
    "yolov3": make_heads(ignore_thresh=0.4),
    "yolov3-giou": make_heads(iou_loss=IouKind.giou, iou_normalizer=0.5, ignore_thresh=0.4),
    "yolov4": make_heads(1.1, iou_loss=IouKind.ciou, iou_normalizer=0.07, iou_thresh=0.213, ignore_thresh=0.4),
    "yolov4-mse": make_heads(1.2, iou_normalizer=0.07, iou_thresh=0.213),
    "yolov4-csp": make_heads(
        2.0, True, iou_loss=IouKind.ciou, iou_normalizer=0.05, iou_thresh=0.2, cls_normalizer=0.5, obj_normalizer=4.0
    ),
    "new_coords-mse": make_heads(2.0, True, ignore_thresh=0.4),
    "iou": make_heads(iou_loss=IouKind.iou),
    "diou": make_heads(iou_loss=IouKind.diou, iou_thresh=0.3),
}
EACH = pytest.mark.parametrize("heads", CASES.values(), ids=CASES)


def random_maps(batch: int, heads: list[Head]) -> list[Tensor]:
    return [
        torch.randn(batch, len(head.anchors), SIZE[0] // head.stride, SIZE[1] // head.stride, len(lower)) - lower
        for head in heads
        for lower in [torch.tensor([0] * 4 * max(1, head.box_bins) + [1] + [2] * head.num_classes)]
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


@EACH
@pytest.mark.parametrize("pairs_at_once", [assignment.PAIRS_AT_ONCE, 700])
def test_gradients_are_darknets_and_losses_the_reference(heads, pairs_at_once, monkeypatch) -> None:
    monkeypatch.setattr(assignment, "PAIRS_AT_ONCE", pairs_at_once)
    maps, targets = [raw.requires_grad_() for raw in random_maps(3, heads)], random_targets(40, 3)
    parts = DarknetLoss(heads)(maps, targets)
    parts.total.backward()
    expected = darknet([raw.detach().numpy() for raw in maps], targets.tolist(), heads, SIZE)
    losses = torch.tensor([*expected.losses, 0, 0]).float() / 3  # neither bins nor a distance
    torch.testing.assert_close(torch.stack(parts[1:]), losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(parts.total, sum(parts[1:]))
    for raw, delta in zip(maps, expected.deltas, strict=True):
        np.testing.assert_allclose(-raw.grad.numpy() * 3, delta, rtol=1e-3, atol=1e-4)
    for rule in ("left out", "not recognised", "best", "several classes"):
        assert expected.seen[rule], f"no {rule} in this case"
    assert (expected.seen["alike"] > 0) == (heads[0].darknet_loss.iou_thresh < 1)


def test_a_network_of_a_cfg_brings_its_keys() -> None:
    heads = Darknet(zoo_cfg("yolov3-tiny"), num_classes=3, width=0.125).heads
    assert heads[0].darknet_loss == DarknetLossKeys(iou_loss=None, ignore_thresh=0.7, iou_normalizer=0.75)
    keys = Darknet(zoo_cfg("yolov4"), num_classes=3, width=0.125).heads[0].darknet_loss
    assert keys == DarknetLossKeys(IouKind.ciou, iou_normalizer=0.07, ignore_thresh=0.7, iou_thresh=0.213)
