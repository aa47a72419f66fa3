"""What all losses share, the YOLOv3-SPP loss and the YOLOX loss.

YoloLoss has the formulation of the first PyTorch YOLOv3-SPP (ultralytics/yolov3, branch archive):
every anchor of every head whose shape fits a target is positive in the cell that holds the target's
centre, and each term is a sum over the heads of their means. In YoloxLoss the predictions choose
the positives. In both, a box with several labels is one object of several classes.

All arithmetic is in float32, or in float64 for float64 maps. Shapes depend only on the number of
targets (no boolean indexing), so a step on an accelerator never waits for the host.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial, reduce
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.assignment import Cells, centre_cells, dynamic_positives, merge_labels, targets_in_cells
from models.config import MIN_DECOUPLED_SCALE, IouKind, YoloLossConfig, YoloxLossConfig
from models.decode import at_least_float32, box_iou_aligned, boxes_in_cells, wh_iou
from models.errors import ModelError
from models.heads import Anchors, Head, HeadAnchors, HeadMap

Terms = dict[str, Tensor]  # scalars of one head, by the fields of LossParts
Weights = dict[str, float]  # of the terms, by the same fields
POSITIVES = "positives"  # the term that, where a loss has it, counts what the others are divided by
# Of logits and targets, elementwise; its gradient is probability - target.
cross_entropy = partial(nn.functional.binary_cross_entropy_with_logits, reduction="none")
MIN_BOX_SIDE = 1e-3  # pixels; bounds the logarithm of a size
BIN_MARGIN = 1e-3  # a target distance stays this much below the last bin, so there is a bin above it


class LossParts(NamedTuple):
    """Scalars: ``total`` for backward, and the weighted terms that add up to it, detached.

    A term that a loss lacks is 0. Logs, tables and curves take their columns from these fields.
    """

    total: Tensor
    box: Tensor
    objectness: Tensor
    classification: Tensor
    dfl: Tensor  # distribution focal loss, of boxes of bins
    l1: Tensor  # L1 distance of boxes, in epochs without mosaics


class LossInputs(NamedTuple):
    """The arguments of HeadLoss.sums, with each raw map beside its head."""

    maps: list[HeadMap]
    targets: Tensor
    positives_per_image: Tensor
    objectness_ratio: float | Tensor
    refines: bool


class HeadLoss(ABC):
    """A loss of raw maps against targets, which adds up the terms of all heads of a network."""

    def __init__(self, heads: Sequence[Head]) -> None:
        self.heads = list(heads)
        self._anchors = HeadAnchors(self.heads)

    def __call__(
        self,
        raw_maps: Sequence[Tensor],
        targets: Tensor,
        objectness_ratio: float | Tensor = 1.0,
        refines: bool = False,
    ) -> LossParts:
        """The loss of a step that is this batch alone; the arguments are those of ``sums``."""
        images = len(raw_maps[0])
        per_image = self.count_positives(targets) / images
        sums, divisor = self.sums(raw_maps, targets, per_image, objectness_ratio, refines)
        return LossParts(*(part / divisor.clamp(min=images) for part in sums))

    def count_positives(self, targets: Tensor) -> Tensor:
        """The positives (heads,), float64, where targets (t, 6) alone decide; else (0,)."""
        return targets.new_zeros(0, dtype=torch.float64)

    def sums(
        self,
        raw_maps: Sequence[Tensor],
        targets: Tensor,
        positives_per_image: Tensor,
        objectness_ratio: float | Tensor = 1.0,
        refines: bool = False,
    ) -> tuple[LossParts, Tensor]:
        """The sums of one pass of one rank, and its share of what they are to be divided by.

        Sums and divisors are added up over all passes and ranks of a step, so that each image and
        each positive weighs the same in any micro-batch. The divisor is the number of images or of
        positives. The caller uses at least the number of images: else a step without objects would
        push the objectness down a hundred times as hard as others.

        raw_maps: as Darknet returns them, of any float type.
        targets: float32 (t, 6): image index in the batch, class, cx, cy, w, h in pixels of the
            batch's images. A row of zeros counts for nothing.
        positives_per_image: what ``count_positives`` gives for all targets of the step, over the
            images of the step.
        objectness_ratio: blends the objectness target of a positive from 1 (at 0) to its IoU (at
            1), in losses that have such targets.
        refines: true in epochs without mosaics, which fit boxes more closely.
        """
        with torch.autocast(device_type=targets.device.type, enabled=False):
            maps = [HeadMap(*parts) for parts in zip(self.heads, self._anchors[targets.device], raw_maps, strict=True)]
            targets = targets.to(at_least_float32(raw_maps[0]).dtype)
            inputs = LossInputs(maps, targets, positives_per_image, objectness_ratio, refines)
            terms, weights = self.terms(inputs)
            added = {
                name: torch.stack([of_head[name] for of_head in terms if name in of_head]).sum()
                for name in dict.fromkeys(chain(*terms))
            }
            images = targets.new_full((), len(raw_maps[0]))
            divisor = added.pop(POSITIVES, images)
            parts = {name: value * weights[name] for name, value in added.items()}
            total = reduce(torch.add, parts.values())
            missing = dict.fromkeys(LossParts._fields[1:], total.new_zeros(()))
            return LossParts(total, **missing | {name: part.detach() for name, part in parts.items()}), divisor

    @abstractmethod
    def terms(self, inputs: LossInputs) -> tuple[list[Terms], Weights]:
        """The terms of each head, summed over this pass, and the weight of each term.

        A term POSITIVES, which has no weight, is this pass's share of the divisor.
        """


class YoloLoss(HeadLoss):
    """The YOLOv3-SPP loss: means over the positives of each head and over the cells of a step."""

    def __init__(self, heads: Sequence[Head], config: YoloLossConfig) -> None:
        super().__init__(heads)
        self.config = config
        if any(len(head.parts) > 1 for head in heads):
            raise ModelError("decoupled heads have too few anchors for a loss that matches shapes. fix: loss=yolox")

    def count_positives(self, targets: Tensor) -> Tensor:
        """The positives (heads,): pairs of a target (t, 6) and an anchor of like shape."""
        targets, _ = merge_labels(targets, self.heads[0].num_classes)
        matches = [self._matches(targets, anchors) for anchors in self._anchors[targets.device]]
        return torch.stack([match.sum() for match in matches]).double()

    def _matches(self, targets: Tensor, anchors: Anchors) -> Tensor:
        """Whether the shapes of targets (t, 6) fit a head's own anchors, bool (t, anchors)."""
        return wh_iou(targets[:, 4:6].float(), anchors.own) > self.config.anchor_iou

    def terms(self, inputs: LossInputs) -> tuple[list[Terms], Weights]:
        """Sums over the images of means over their cells and over the step's positives."""
        config = self.config
        targets, classes = merge_labels(inputs.targets, self.heads[0].num_classes)
        inputs = inputs._replace(targets=targets)
        # Without positives the terms are 0, not 0 / 0.
        shares = 1 / inputs.positives_per_image.clamp(min=1e-9)
        terms = [
            self._head_terms(part, share, inputs, classes) for part, share in zip(inputs.maps, shares, strict=True)
        ]
        classification = config.classification * self.heads[0].num_classes / 80
        return terms, {"box": config.box, "objectness": config.objectness, "classification": classification}

    def _head_terms(self, part: HeadMap, share: Tensor, inputs: LossInputs, classes: Tensor) -> Terms:
        """The terms of one head; a positive weighs ``share``."""
        head, anchors, raw = part
        logits = at_least_float32(raw[..., 4])
        share = share.to(logits.dtype)
        weight = self._matches(inputs.targets, anchors).to(logits.dtype)  # (t, anchors), 0 where a shape does not match
        cells = centre_cells(inputs.targets, head.stride, raw.shape)
        _, class_logits, boxes, wanted_boxes = _predictions(part, cells, inputs.targets)
        iou = box_iou_aligned(boxes, wanted_boxes, self.config.iou)
        box = ((1 - iou) * weight).sum() * share

        ratio = inputs.objectness_ratio
        wanted = _at_cells(weight * (1 - ratio + ratio * iou.detach().clamp(min=0)), cells, raw)
        objectness = cross_entropy(logits, wanted).sum() / logits[0].numel()

        # Even a single class is learnt: decoding multiplies by its probability, as in Darknet.
        losses = cross_entropy(class_logits, _at_logits(classes, class_logits)).mean(-1)
        return {"box": box, "objectness": objectness, "classification": (losses * weight).sum() * share}


class YoloxLoss(HeadLoss):
    """The loss of YOLOX (Ge et al. 2021, arXiv 2107.08430), for heads whose cells reach far.

    The predictions choose and weigh the positives (dynamic_positives). The target of objectness is
    this weight, and 0 in all other cells; that of a class is the IoU of its box. The box term is
    1 - IoU^2, or 1 minus another overlap measure. Boxes of bins add the cross-entropy of their
    sides (dfl), and epochs without mosaics the L1 distance. All are divided by the sum of the
    weights.
    """

    def __init__(self, heads: Sequence[Head], config: YoloxLossConfig) -> None:
        super().__init__(heads)
        self.config = config
        if (reach := min(head.scale_x_y for head in heads)) < MIN_DECOUPLED_SCALE:
            raise ModelError(
                f"loss=yolox needs heads of scale_x_y={MIN_DECOUPLED_SCALE} or more, not {reach:g}. fix: loss=yolov3"
            )

    def terms(self, inputs: LossInputs) -> tuple[list[Terms], Weights]:
        """Sums over positives and cells, to be divided by the sum of the positives' weights."""
        config = self.config
        targets, classes = merge_labels(inputs.targets, self.heads[0].num_classes)
        inputs = inputs._replace(targets=targets)
        pairs = dynamic_positives(inputs.maps, targets, config.positives, config.positives_by)
        terms = [self._head_terms(part, *pair, inputs, classes) for part, pair in zip(inputs.maps, pairs, strict=True)]
        weights = {"objectness": config.objectness, "classification": config.classification}
        return terms, weights | dict.fromkeys(("box", "dfl", "l1"), config.box)  # dfl and l1 are relative to box

    def _head_terms(self, part: HeadMap, weight: Tensor, cells: Cells, inputs: LossInputs, classes: Tensor) -> Terms:
        """The sums of one head."""
        config = self.config
        coordinates, class_logits, boxes, wanted_boxes = _predictions(part, cells, inputs.targets)
        iou = box_iou_aligned(boxes, wanted_boxes, IouKind.iou)
        is_iou = config.iou is IouKind.iou
        losses = 1 - iou.square() if is_iou else 1 - box_iou_aligned(boxes, wanted_boxes, config.iou)
        terms = {POSITIVES: weight.sum(), "box": (losses * weight).sum()}
        if inputs.refines:
            terms["l1"] = (config.l1 * _distance(boxes, wanted_boxes, part.head.stride) * weight).sum()
        if part.head.box_bins:
            terms["dfl"] = (config.dfl * _bin_losses(coordinates, wanted_boxes, part.head) * weight).sum()

        wanted = _at_cells(weight, cells, part.raw)
        _, objectness_logits, _ = part.head.split(part.raw)
        terms["objectness"] = cross_entropy(at_least_float32(objectness_logits[..., 0]), wanted).sum()

        quality = iou.detach()[..., None] * _at_logits(classes, class_logits)
        terms["classification"] = (cross_entropy(class_logits, quality).sum(-1) * weight).sum()
        return terms


def _predictions(part: HeadMap, cells: Cells, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Coordinates and class logits (t, p, ...) at the cells, their boxes and the targets' boxes.

    Boxes are corners (t, p, 4) in pixels from the corners of their cells.
    """
    head, anchors, raw = part
    coordinates, _, class_logits = head.split(at_least_float32(raw[tuple(cells)]))  # matched or not
    boxes = boxes_in_cells(coordinates, anchors.own[cells.anchor], head)
    return coordinates, class_logits, boxes, targets_in_cells(targets, cells, head.stride)


def _bin_losses(coordinates: Tensor, wanted_xyxy: Tensor, head: Head) -> Tensor:
    """Distribution focal loss (t, p), a mean over the sides (Li et al. 2020, arXiv 2006.04388).

    It is the cross-entropy with a target that is shared by the two bins it lies between.
    """
    low, high = (wanted_xyxy / head.stride - 0.5).split(2, dim=-1)
    sides = torch.cat((-low, high), dim=-1).clamp(0, head.box_bins - 1 - BIN_MARGIN)[..., None]
    logs, below = coordinates.unflatten(-1, (4, head.box_bins)).log_softmax(dim=-1), sides.long()
    above = sides - below  # the share of the bin above
    losses: Tensor = (above - 1) * logs.gather(-1, below) - above * logs.gather(-1, below + 1)
    return losses.mean(dim=(-2, -1))


def _distance(boxes_xyxy: Tensor, wanted_xyxy: Tensor, stride: int) -> Tensor:
    """L1 distance (t, p) of boxes (t, p, 4): centres in cells, and the logarithms of sizes."""
    (low, high), (wanted_low, wanted_high) = boxes_xyxy.split(2, -1), wanted_xyxy.split(2, -1)
    centres = (low + high - wanted_low - wanted_high).abs() / (2 * stride)
    size, wanted = (each.clamp(min=MIN_BOX_SIDE).log() for each in (high - low, wanted_high - wanted_low))
    distances: Tensor = centres + (size - wanted).abs()
    return distances.sum(-1)


def _at_cells(values: Tensor, cells: Cells, raw: Tensor) -> Tensor:
    """A map (batch, anchors, rows, columns) with values (t, p) at the cells and 0 elsewhere.

    If several targets claim one anchor of one cell, the largest value counts, whatever their order;
    the box and class terms count each. Pairs that do not match write 0.
    """
    wanted = values.new_zeros(raw.shape[:4])
    wanted.view(-1).scatter_reduce_(0, cells.flat(raw.shape).flatten(), values.flatten(), reduce="amax")
    return wanted


def _at_logits(classes: Tensor, class_logits: Tensor) -> Tensor:
    """Classes (t, c) in shape and type of logits (t, p, c)."""
    return classes[:, None].to(class_logits.dtype).expand_as(class_logits)
