"""Darknet's loss, configured by each [yolo] section (DarknetLossKeys in models/heads.py).

Source: AlexeyAB/darknet, src/yolo_layer.c and src/box.c. For each head:
- Every anchor of every cell is a negative (objectness 0). It is ignored if its decoded box overlaps
  an object by more than ignore_thresh and its best class probability is above 0.25.
- Every object takes the anchor of the .cfg with the most similar shape. If the head has it, it is
  positive in the cell of the object's centre. With iou_thresh below 1 so are the head's anchors
  that overlap by more.
- A positive has objectness 1, one class term with the classes of all its objects, and a box term
  for each. With iou_thresh below 1 the sum of the box terms is divided by the number of classes.
Terms are summed over an image, and divided only by the number of images in the step.

Darknet defines gradients, not losses. The objectness, class and mse terms here are functions with
those gradients: cross-entropies of the logits (for mse also of the offsets in the cell) and squared
errors of the sizes. The overlap terms are 1 - IoU of boxes in units of the image. As in Darknet,
their gradient goes to the raw values without the derivatives of sigmoid and grid for centres and of
the anchor for sizes: with the exact chain rule boxes are hardly learnt (docs/results/).

Differences from Darknet: with new_coords Darknet also multiplies by the derivative of the logistic
layer before the head, so predictions far from their targets learn slowest (docs/results/).
cls_normalizer always weighs the class term (in Darknet only with counters_per_class). The overlap's
derivatives by width and height are not doubled; those of CIoU's aspect term are exact. A centre on
the far edge belongs to the last cell. Without effect: objectness_smooth, with which a short
training learns little (docs/results/), truth_thresh (1 in all published files), label_smooth_eps,
focal_loss, max_delta, counters_per_class, iou_thresh_kind.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from models import decode
from models.assignment import Cells, best_overlaps, centre_cells, merge_classes
from models.cfg import ModelError
from models.heads import Head, HeadMap
from models.loss import HeadLoss, LossInputs, Terms, Weights, YoloLoss, YoloxLoss, cross_entropy

RECOGNISED = math.log(0.25 / (1 - 0.25))  # a box may be ignored if a class logit is above this


class DarknetLoss(HeadLoss):
    """The loss that the .cfg specifies, a mean over a step's images; ignores objectness_ratio."""

    def __init__(self, heads: Sequence[Head]) -> None:
        super().__init__(heads)
        if any(head.box_bins or head.linear_xy for head in heads):
            raise ModelError("loss=darknet learns neither bins nor linear_xy", "model.box_bins=0, or loss=yolox")

    def terms(self, inputs: LossInputs) -> tuple[list[Terms], Weights]:
        """Sums over the images, times the normalizers of the sections."""
        targets = inputs.targets
        terms = []
        for part in inputs.maps:
            head, anchors, raw = part
            keys = head.darknet_loss
            shape = raw.shape[:4]
            overlap = decode.wh_iou(targets[:, 4:6], anchors.all)  # of shapes; 0 for rows that fill a batch
            most, anchor = overlap.max(1, keepdim=True)  # the first of equals
            positive = (anchor == anchors.mask) & (most > 0)
            if keys.iou_thresh < 1:
                positive = positive | (overlap[:, anchors.mask] > keys.iou_thresh)
            weight = positive.to(targets.dtype)  # (t, a)
            cells = centre_cells(part, targets)
            places = cells.flat(raw.shape)
            # How many objects learn each anchor of each cell.
            counts = weight.new_zeros(shape.numel())
            counts.scatter_add_(0, places.flatten(), weight.flatten())
            boxes = decode.decode_boxes(decode.at_least_float32(raw[..., :4].detach()), anchors.own, head)
            overlaps = best_overlaps(boxes.flatten(1, 3), targets).view(shape)
            recognised = raw[..., 5:].detach().amax(-1).float() > RECOGNISED
            left_out = recognised & (overlaps > keys.ignore_thresh)
            wanted = counts.clamp(max=1).view(shape)
            counted = torch.maximum(wanted, (~left_out).to(wanted.dtype))
            objectness = cross_entropy(decode.at_least_float32(raw[..., 4]), wanted) * counted
            predicted = decode.at_least_float32(raw[tuple(cells)])  # (t, a, 5 + classes)
            classes, _ = merge_classes(places, weight, targets[:, 1:2], head.num_classes)
            class_losses = cross_entropy(predicted[..., 5:], classes).sum(-1) * weight
            box_losses = _box_losses(part, cells, predicted[..., :4], targets) * weight
            if keys.iou_thresh < 1:
                box_losses = box_losses / classes.sum(-1).clamp(min=1)
            of_head = {
                "box": box_losses.sum() * keys.iou_normalizer,
                "objectness": objectness.sum() * keys.obj_normalizer,
                "classification": (class_losses / counts[places].clamp(min=1)).sum() * keys.cls_normalizer,
            }
            terms.append(of_head)
        return terms, dict.fromkeys(("box", "objectness", "classification"), 1.0)


def _box_losses(part: HeadMap, cells: Cells, predicted: Tensor, targets: Tensor) -> Tensor:
    """Box losses (t, a) of raw coordinates (t, a, 4) at the cells for targets (t, 6)."""
    head = part.head
    raw = part.raw
    anchors = part.anchors.own[cells.anchor]
    raw_xy, raw_wh = predicted.split(2, -1)
    image_size = targets.new_full((2,), raw.shape[3] * head.stride)  # width, height; filled on the device
    image_size[1] = raw.shape[2] * head.stride
    centre = targets[:, None, 2:4] / head.stride  # in cells
    centre = centre - torch.stack((cells.column, cells.row), -1)  # from the corner of the cell
    size = targets[:, None, 4:6].clamp(min=decode.EPS)
    kind = head.darknet_loss.iou_loss
    if kind is None:  # Darknet's gradients: offset - wanted in cells, and raw or sigmoid - wanted in anchors
        probability = (centre + (head.scale_x_y - 1) / 2) / head.scale_x_y  # inverse of cell_offsets
        errors = _divergence(raw_xy, probability) * head.scale_x_y
        wanted = size / anchors
        if head.new_coords:
            errors = errors + _divergence(raw_wh, (wanted.sqrt() / 2).clamp(max=1))
        else:
            errors = errors + (raw_wh - wanted.log()).square() / 2
        return errors.sum(-1) * (2 - (size / image_size).prod(-1))  # small objects count more
    # Darknet's units: the image's width and height are 1.
    cell = head.stride / image_size
    growth = 1 if head.new_coords else raw_wh.detach().clamp(max=decode.MAX_LOG_SIZE).exp()
    offset = _carried_by(raw_xy, decode.cell_offsets(raw_xy, head) * cell)
    extent = _carried_by(raw_wh, decode.box_sizes(raw_wh, anchors, head) / image_size, growth)
    boxes_xyxy = decode.cxcywh_to_xyxy(torch.cat((offset, extent), -1))
    wanted_xyxy = decode.cxcywh_to_xyxy(torch.cat((centre * cell, size / image_size), -1))
    return 1 - decode.box_iou_aligned(boxes_xyxy, wanted_xyxy, kind)


def _divergence(logits: Tensor, wanted: Tensor) -> Tensor:
    """Elementwise cross-entropy minus its minimum: 0 where a target between 0 and 1 is met."""
    least: Tensor = torch.special.entr(wanted) + torch.special.entr(1 - wanted)
    return cross_entropy(logits, wanted.expand_as(logits)) - least


def _carried_by(carrier: Tensor, value: Tensor, factor: Tensor | float = 1) -> Tensor:
    """`value`, but its gradient goes to `carrier` instead, times `factor`."""
    return value.detach() + (carrier - carrier.detach()) * factor


# By the name that loss= selects; plugins add their own.
LOSSES: dict[str, Callable[..., HeadLoss]] = {"yolov3": YoloLoss, "yolox": YoloxLoss, "darknet": DarknetLoss}
