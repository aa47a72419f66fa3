"""What all losses share, the YOLOv3-SPP loss and the YOLOX loss.

YoloLoss has the formulation of the first PyTorch YOLOv3-SPP (ultralytics/yolov3, branch archive):
every anchor of every head whose shape fits a target is positive in the cell that holds the target's
centre, and each term is a sum over the heads of their means. In YoloxLoss the predictions choose
the positives. In both, a box with several labels is one object of several classes.

Arithmetic is in float32, or in float64 for float64 maps. Shapes depend only on the number of
targets, so a step on an accelerator never waits for the host.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.assignment import Cells, candidates, centre_cells, dynamic_positives, merge_labels, predictions
from models.cfg import ModelError
from models.config import MIN_DECOUPLED_SCALE, IouKind, YoloLossConfig, YoloxLossConfig
from models.decode import at_least_float32, box_iou_aligned, wh_iou
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
        self, raw_maps: Sequence[Tensor], targets: Tensor, objectness_ratio: float = 1.0, refines: bool = False
    ) -> LossParts:
        """The loss of a step that is this batch alone; the arguments are those of ``sums``."""
        images = len(raw_maps[0])
        per_image = self.count_positives(targets) / images
        sums, divisor = self.sums(raw_maps, targets, per_image, objectness_ratio, refines)
        return LossParts(*torch.stack(sums) / divisor.clamp(min=images))

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

        The caller adds up both over all passes and ranks of a step, so that each image and each
        positive weighs the same in any micro-batch, and divides by at least the number of images:
        else a step without objects would push the objectness down a hundred times as hard.

        raw_maps: as Darknet returns them, of any float type. targets: float32 (t, 6): image index
        in the batch, class, cx, cy, w, h in pixels of the batch's images; a row of zeros counts for
        nothing. positives_per_image: what ``count_positives`` gives for all targets of the step,
        over its images. objectness_ratio: blends the objectness target of a positive from 1 (at 0)
        to its IoU (at 1), if a loss has such targets. refines: true in epochs without mosaics.
        """
        with torch.autocast(device_type=targets.device.type, enabled=False):
            maps = list(map(HeadMap, self.heads, self._anchors[targets.device], raw_maps))
            targets = targets.to(at_least_float32(raw_maps[0]).dtype)
            terms, weights = self.terms(LossInputs(maps, targets, positives_per_image, objectness_ratio, refines))
            added: Terms = {}
            for of_head in terms:
                for name, term in of_head.items():
                    added[name] = added[name] + term if name in added else term
            divisor = added.pop(POSITIVES, targets.new_full((), len(raw_maps[0])))
            for name in added:
                added[name] = added[name] * weights[name]
            total = torch.stack(list(added.values())).sum()
            parts = dict.fromkeys(LossParts._fields[1:], total.new_zeros(()))
            for name, term in added.items():
                parts[name] = term.detach()
            return LossParts(total, **parts), divisor

    @abstractmethod
    def terms(self, inputs: LossInputs) -> tuple[list[Terms], Weights]:
        """The terms of each head, summed over this pass, and their weights; POSITIVES has none."""


class YoloLoss(HeadLoss):
    """The YOLOv3-SPP loss: means over the positives of each head and over the cells of a step."""

    def __init__(self, heads: Sequence[Head], config: YoloLossConfig) -> None:
        super().__init__(heads)
        self.config = config
        for head in heads:
            if len(head.parts) > 1:
                raise ModelError("decoupled heads have too few anchors for a loss that matches shapes", "loss=yolox")

    def count_positives(self, targets: Tensor) -> Tensor:
        """The positives (heads,): pairs of a target (t, 6) and an anchor of like shape."""
        targets, _ = merge_labels(targets, self.heads[0].num_classes)
        matches = [self._matches(targets, anchors).sum() for anchors in self._anchors[targets.device]]
        return torch.stack(matches).double()

    def _matches(self, targets: Tensor, anchors: Anchors) -> Tensor:
        """Whether the shapes of targets (t, 6) fit a head's own anchors, bool (t, anchors)."""
        return wh_iou(targets[:, 4:6].float(), anchors.own) > self.config.anchor_iou

    def terms(self, inputs: LossInputs) -> tuple[list[Terms], Weights]:
        """Sums over the images of means over their cells and over the step's positives."""
        config, ratio = self.config, inputs.objectness_ratio
        num_classes = self.heads[0].num_classes
        targets, labels = merge_labels(inputs.targets, num_classes)
        shares = (1 / inputs.positives_per_image.clamp(min=1e-9)).to(targets.dtype)  # never 0 / 0
        terms = []
        for part, share in zip(inputs.maps, shares, strict=True):
            weight = self._matches(targets, part.anchors).to(targets.dtype)  # (t, a), 0 where shapes differ
            found = predictions(part, centre_cells(part, targets), targets)  # matched or not
            iou = box_iou_aligned(found.boxes_xyxy, found.wanted_xyxy, config.iou)
            objectness = weight * (1 - ratio + ratio * iou.detach().clamp(min=0))
            logits = at_least_float32(part.raw[..., 4])
            # Even a single class is learnt: decoding multiplies by its probability, as in Darknet.
            classes = cross_entropy(found.classes, labels[:, None].expand_as(found.classes)).mean(-1)
            of_cells = cross_entropy(logits, _at_cells(objectness, found.cells, logits))
            of_head = {"box": ((1 - iou) * weight).sum() * share, "objectness": of_cells.sum() / logits[0].numel()}
            terms.append(of_head | {"classification": (classes * weight).sum() * share})
        classification = config.classification * num_classes / 80
        return terms, {"box": config.box, "objectness": config.objectness, "classification": classification}


class YoloxLoss(HeadLoss):
    """The loss of YOLOX (Ge et al. 2021, arXiv 2107.08430), for heads whose cells reach far.

    The predictions choose and weigh the positives (dynamic_positives). The target of objectness is
    this weight, and 0 in all other cells; that of a class is the IoU of its box. The box term is 1
    - IoU^2, or 1 minus another overlap measure. Boxes of bins add the cross-entropy of their sides
    (dfl), and epochs without mosaics the L1 distance.
    """

    def __init__(self, heads: Sequence[Head], config: YoloxLossConfig) -> None:
        super().__init__(heads)
        self.config = config
        reach = min(head.scale_x_y for head in heads)
        if reach < MIN_DECOUPLED_SCALE:
            needed = f"scale_x_y={MIN_DECOUPLED_SCALE} or more"
            raise ModelError(f"loss=yolox needs heads of {needed}, not {reach:g}", "loss=yolov3")

    def terms(self, inputs: LossInputs) -> tuple[list[Terms], Weights]:
        """Sums over positives and cells, to be divided by the sum of the positives' weights."""
        config = self.config
        targets, labels = merge_labels(inputs.targets, self.heads[0].num_classes)
        candidates_of = [candidates(part, targets) for part in inputs.maps]
        learn = dynamic_positives(inputs.maps, candidates_of, targets, config.positives, config.positives_by)
        terms = []
        for part, (_, found), weight in zip(inputs.maps, candidates_of, learn, strict=True):
            head, boxes = part.head, found.boxes_xyxy
            wanted = found.wanted_xyxy
            iou = box_iou_aligned(boxes, wanted, IouKind.iou)
            overlap = iou.square() if config.iou is IouKind.iou else box_iou_aligned(boxes, wanted, config.iou)
            logits = at_least_float32(head.split(part.raw)[1][..., 0])
            quality = iou.detach()[..., None] * labels[:, None]
            of_head = {
                POSITIVES: weight.sum(),
                "box": ((1 - overlap) * weight).sum(),
                "objectness": cross_entropy(logits, _at_cells(weight, found.cells, logits)).sum(),
                "classification": (cross_entropy(found.classes, quality).sum(-1) * weight).sum(),
            }
            if inputs.refines:
                of_head["l1"] = config.l1 * (_distance(boxes, wanted, head.stride) * weight).sum()
            if head.box_bins:
                of_head["dfl"] = config.dfl * (_bin_losses(found.coordinates, wanted, head) * weight).sum()
            terms.append(of_head)
        weights = {"objectness": config.objectness, "classification": config.classification}
        return terms, weights | dict.fromkeys(("box", "dfl", "l1"), config.box)  # dfl, l1 are relative to box


def _bin_losses(coordinates: Tensor, wanted_xyxy: Tensor, head: Head) -> Tensor:
    """Distribution focal loss (t, p), a mean over the sides (Li et al. 2020, arXiv 2006.04388)."""
    low, high = (wanted_xyxy / head.stride - 0.5).split(2, -1)
    sides = torch.cat((-low, high), -1).clamp(0, head.box_bins - 1 - BIN_MARGIN)[..., None]
    logs = coordinates.unflatten(-1, (4, head.box_bins)).log_softmax(-1)
    below = sides.long()
    above = sides - below  # the share of the bin above
    losses: Tensor = (above - 1) * logs.gather(-1, below) - above * logs.gather(-1, below + 1)
    return losses.mean(dim=(-2, -1))


def _distance(boxes_xyxy: Tensor, wanted_xyxy: Tensor, stride: int) -> Tensor:
    """L1 distance (t, p) of boxes (t, p, 4): centres in cells, and the logarithms of sizes."""
    low, high = boxes_xyxy.split(2, -1)
    wanted_low, wanted_high = wanted_xyxy.split(2, -1)
    centres = (low + high - wanted_low - wanted_high).abs() / (2 * stride)
    log_size = (high - low).clamp(min=MIN_BOX_SIDE).log()
    wanted_log_size = (wanted_high - wanted_low).clamp(min=MIN_BOX_SIDE).log()
    distances: Tensor = centres + (log_size - wanted_log_size).abs()
    return distances.sum(-1)


def _at_cells(values: Tensor, cells: Cells, logits: Tensor) -> Tensor:
    """A map like the logits (batch, anchors, rows, columns): values (t, p) at the cells, else 0.

    If several targets claim one anchor of one cell, the largest value counts, whatever their order;
    the box and class terms count each. Pairs that do not match write 0.
    """
    wanted = values.new_zeros(logits.shape)
    wanted.view(-1).scatter_reduce_(0, cells.flat(logits.shape).flatten(), values.flatten(), reduce="amax")
    return wanted
