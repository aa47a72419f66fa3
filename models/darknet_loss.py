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
errors of the sizes. The overlap terms are 1 - IoU of boxes in units of the image. Their gradient
goes to the raw values as in Darknet, without the derivatives of sigmoid and grid for centres and of
the anchor for sizes. The normalizers in .cfg files are tuned for that: with the exact chain rule
boxes are hardly learnt (docs/results/).

Differences from Darknet: with new_coords Darknet also multiplies by the derivative of the logistic
layer before the head, so predictions far from their targets learn slowest. Here the gradient goes
to the raw values as in other heads, which learns better (docs/results/). cls_normalizer always
weighs the class term (in Darknet only with counters_per_class). The overlap's derivatives by width
and height are not doubled; those of CIoU's aspect term are exact. A centre on the far edge belongs
to the last cell. Not used: objectness_smooth, with which a short training learns little
(docs/results/). Not implemented: truth_thresh (1 in all published files), label_smooth_eps,
focal_loss, max_delta, counters_per_class, iou_thresh_kind.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from models import assignment, decode
from models.assignment import Cells
from models.errors import ModelError
from models.heads import Head, HeadMap
from models.loss import HeadLoss, LossInputs, Terms, Weights, cross_entropy

RECOGNISED = math.log(0.25 / (1 - 0.25))  # a box may be ignored if a class logit is above this


class DarknetLoss(HeadLoss):
    """The loss that the .cfg of a network specifies, averaged over the images of a step.

    It does not use objectness_ratio: the objectness target of a positive is 1.
    """

    def __init__(self, heads: Sequence[Head]) -> None:
        super().__init__(heads)
        if any(head.box_bins for head in heads):
            raise ModelError("loss=darknet does not learn boxes of bins. fix: model.box_bins=0, or loss=yolox")

    def terms(self, inputs: LossInputs) -> tuple[list[Terms], Weights]:
        """Sums over the images."""
        terms = [self._head_terms(part, inputs.targets) for part in inputs.maps]
        return terms, dict.fromkeys(("box", "objectness", "classification"), 1.0)

    def _head_terms(self, part: HeadMap, targets: Tensor) -> Terms:
        """The terms of one head, times the normalizers of its section."""
        head, anchors, raw = part
        keys = head.darknet_loss
        boxes = decode.decode_boxes(decode.at_least_float32(raw[..., :4].detach()), anchors.own, head).flatten(1, 3)
        overlaps = assignment.best_overlaps(boxes, targets)  # (batch, a * rows * columns)
        weight, cells, objects = assignment.positives_by_shape(
            targets, anchors, head.stride, raw.shape, keys.iou_thresh
        )
        predicted = decode.at_least_float32(raw[tuple(cells)])  # (p, 5 + classes)

        recognised = raw[..., 5:].detach().amax(-1).float() > RECOGNISED
        left_out = recognised & (overlaps.view(raw.shape[:4]) > keys.ignore_thresh)
        places = cells.flat(raw.shape)
        wanted = weight.new_zeros(raw.shape[:4])
        wanted.view(-1).scatter_reduce_(0, places, weight, reduce="amax")
        counted = torch.maximum(wanted, (~left_out).to(wanted.dtype))
        objectness = (cross_entropy(decode.at_least_float32(raw[..., 4]), wanted) * counted).sum()

        classes, objects_there = assignment.merge_classes(places, weight, objects[:, 1], head.num_classes)
        classification = (cross_entropy(predicted[:, 5:], classes).sum(-1) * weight / objects_there).sum()

        box = _box_losses(part, cells, predicted[:, :4], objects)
        divisor = classes.sum(-1).clamp(min=1) if keys.iou_thresh < 1 else 1
        return {
            "box": (box * weight / divisor).sum() * keys.iou_normalizer,
            "objectness": objectness * keys.obj_normalizer,
            "classification": classification * keys.cls_normalizer,
        }


def _box_losses(part: HeadMap, cells: Cells, raw: Tensor, objects: Tensor) -> Tensor:
    """Box losses (p,) of raw coordinates (p, 4) at the cells (p,) for objects (p, 6)."""
    head, sizes, raw_map = part
    anchors = sizes.own[cells.anchor]
    image_size = objects.new_full((2,), raw_map.shape[3] * head.stride)  # width, height; filled on the device
    image_size[1] = raw_map.shape[2] * head.stride
    corners = torch.stack((cells.column, cells.row), dim=-1)
    raw_xy, raw_wh = raw.split(2, dim=-1)
    centre = objects[:, 2:4] / head.stride - corners  # in cells, from the corner of the cell
    size = objects[:, 4:6].clamp(min=decode.EPS)
    kind = head.darknet_loss.iou_loss
    if kind is None:  # Darknet's gradients are offset - wanted in cells, and raw or sigmoid - wanted in anchors
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
    predicted_centre = _carried_by(raw_xy, decode.cell_offsets(raw_xy, head) * cell)
    predicted_size = _carried_by(raw_wh, decode.box_sizes(raw_wh, anchors, head) / image_size, growth)
    predicted = decode.cxcywh_to_xyxy(torch.cat((predicted_centre, predicted_size), dim=-1))
    boxes = decode.cxcywh_to_xyxy(torch.cat((centre * cell, size / image_size), dim=-1))
    return 1 - decode.box_iou_aligned(predicted, boxes, kind)


def _divergence(logits: Tensor, wanted: Tensor) -> Tensor:
    """Elementwise cross-entropy minus its minimum: 0 where a target between 0 and 1 is met."""
    least: Tensor = torch.special.entr(wanted) + torch.special.entr(1 - wanted)
    return cross_entropy(logits, wanted) - least


def _carried_by(carrier: Tensor, value: Tensor, factor: Tensor | float = 1) -> Tensor:
    """`value`, but its gradient goes to `carrier` instead, times `factor`."""
    return value.detach() + (carrier - carrier.detach()) * factor
