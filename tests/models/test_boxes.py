"""Box formats and overlaps against torchvision, value and gradient."""

import pytest
import torch
from torchvision import ops

from models.boxes import box_iou_aligned, cxcywh_to_xyxy, wh_iou
from models.config import IouKind


def random_boxes(count: int) -> torch.Tensor:
    low = torch.rand(count, 2) * 80
    return torch.cat((low, low + 1 + torch.rand(count, 2) * 60), dim=1)


def test_corners_equal_torchvisions() -> None:
    boxes = ops.box_convert(random_boxes(50), "xyxy", "cxcywh")
    torch.testing.assert_close(cxcywh_to_xyxy(boxes), ops.box_convert(boxes, "cxcywh", "xyxy"))


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


def test_plain_iou_is_the_diagonal_of_torchvisions() -> None:
    one, other = random_boxes(100), random_boxes(100)
    torch.testing.assert_close(box_iou_aligned(one, other, IouKind.iou), ops.box_iou(one, other).diagonal())


@pytest.mark.parametrize("kind", IouKind)
def test_degenerate_boxes_stay_finite(kind: IouKind) -> None:
    point = torch.tensor([[5.0, 5, 5, 5], [0, 0, 0, 10], [0, 0, 1e-20, 1e-20]], requires_grad=True)
    overlap = box_iou_aligned(point, torch.tensor([[5.0, 5, 5, 5], [0, 0, 10, 0], [0, 0, 10, 10]]), kind)
    overlap.sum().backward()
    assert overlap.isfinite().all() and point.grad is not None and point.grad.isfinite().all()


@pytest.mark.parametrize("kind", IouKind)
def test_half_precision_is_computed_in_float32(kind: IouKind) -> None:
    one, other = random_boxes(20).half(), random_boxes(20).half()
    overlap = box_iou_aligned(one, other, kind)
    assert overlap.dtype == torch.float32 and overlap.equal(box_iou_aligned(one.float(), other.float(), kind))


def test_wh_iou_is_the_iou_of_boxes_at_one_corner() -> None:
    sizes1, sizes2 = torch.rand(7, 2) * 50 + 1, torch.rand(9, 2) * 50 + 1
    corner1, corner2 = (torch.cat((torch.zeros_like(sizes), sizes), 1) for sizes in (sizes1, sizes2))
    torch.testing.assert_close(wh_iou(sizes1, sizes2), ops.box_iou(corner1, corner2))
