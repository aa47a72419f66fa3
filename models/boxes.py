"""Box formats and overlaps: x1, y1, x2, y2 corners or cx, cy, w, h centres and sizes, in pixels."""

import math

import torch
from torch import Tensor

from models.config import IouKind

EPS = 1e-7  # keeps quotients finite for boxes without area; far below any area in pixels


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32, or unchanged if float64: losses are computed in these types."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def cxcywh_to_xyxy(boxes_cxcywh: Tensor) -> Tensor:
    """(..., 4) centres and sizes to corners."""
    centre, size = boxes_cxcywh[..., :2], boxes_cxcywh[..., 2:]
    return torch.cat((centre - size / 2, centre + size / 2), dim=-1)


def wh_iou(sizes1: Tensor, sizes2: Tensor) -> Tensor:
    """IoU (n, m) of sizes (n, 2) and (m, 2) around a common centre: how alike two shapes are."""
    intersection = torch.minimum(sizes1[:, None], sizes2[None]).prod(-1)
    union = sizes1.prod(-1)[:, None] + sizes2.prod(-1)[None] - intersection
    return intersection / union.clamp(min=EPS)


def box_iou_aligned(boxes1_xyxy: Tensor, boxes2_xyxy: Tensor, kind: IouKind) -> Tensor:
    """Overlap (...) of two tensors of boxes (..., 4), pair by pair, in float32 or float64.

    Differentiable. GIoU (Rezatofighi et al. 2019) subtracts the share of the enclosing box that
    neither covers. DIoU (Zheng et al. 2020) subtracts the squared distance of the centres over the
    squared diagonal of the enclosing box. CIoU also subtracts the difference of the aspect ratios;
    its weight alpha gets no gradient, as its authors define it.
    """
    # Half precision would lose EPS and, above 2048, whole pixels.
    boxes1_xyxy, boxes2_xyxy = at_least_float32(boxes1_xyxy), at_least_float32(boxes2_xyxy)
    low1, high1 = boxes1_xyxy[..., :2], boxes1_xyxy[..., 2:]
    low2, high2 = boxes2_xyxy[..., :2], boxes2_xyxy[..., 2:]
    size1, size2 = high1 - low1, high2 - low2
    intersection = (torch.minimum(high1, high2) - torch.maximum(low1, low2)).clamp(min=0).prod(-1)
    union = size1.prod(-1) + size2.prod(-1) - intersection
    iou = intersection / union.clamp(min=EPS)
    if kind is IouKind.iou:
        return iou

    enclosing = torch.maximum(high1, high2) - torch.minimum(low1, low2)
    if kind is IouKind.giou:
        area = enclosing.prod(-1).clamp(min=EPS)
        return iou - (area - union) / area

    distance = ((low1 + high1 - low2 - high2) / 2).square().sum(-1)
    diou = iou - distance / enclosing.square().sum(-1).clamp(min=EPS)
    if kind is IouKind.diou:
        return diou

    angle1 = torch.atan(size1[..., 0] / size1[..., 1].clamp(min=EPS))
    angle2 = torch.atan(size2[..., 0] / size2[..., 1].clamp(min=EPS))
    aspect = (2 / math.pi * (angle1 - angle2)).square()
    with torch.no_grad():
        alpha = aspect / (1 - iou + aspect).clamp(min=EPS)
    return diou - alpha * aspect
