"""The losses against a plain-Python reference, and what holds for Darknet's loss, too."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models import DarknetLoss, Head, IouKind, YoloLoss, YoloLossConfig, YoloxLoss, YoloxLossConfig
from models.cfg import ModelError
from models.config import PositivesBy
from models.decode import cxcywh_to_xyxy, decode
from models.heads import RawPart
from models.loss import HeadLoss, LossInputs, LossParts, Terms, Weights
from tests.models import test_darknet_loss as of_darknet
from tests.models.loss_reference import yolo_loss
from tests.models.test_darknet_loss import random_maps, random_targets

HEADS = [
    Head(layer=2, stride=32, anchors=((40, 30), (60, 90), (100, 80)), num_classes=3),
    Head(layer=5, stride=16, anchors=((10, 14), (23, 27), (37, 40)), num_classes=3, scale_x_y=1.2),
]
WIDE_HEADS = [replace(head, scale_x_y=scale) for head, scale in zip(HEADS, (3.0, 6.0), strict=True)]
ONE_ANCHOR = [replace(head, anchors=head.anchors[:1], scale_x_y=6.0) for head in HEADS]
CONFIG = YoloLossConfig(name="yolov3", box=3.54, objectness=64.3, classification=37.4, iou=IouKind.giou, anchor_iou=0.2)
YOLOX = YoloxLossConfig(
    name="yolox",
    box=5.0,
    objectness=1.5,
    classification=0.8,
    iou=IouKind.iou,
    dfl=0.3,
    l1=0.4,
    positives=10,
    positives_by=PositivesBy.cost,
)


class LastEpochs(YoloxLoss):
    def sums(
        self, raw_maps: Any, targets: Any, positives: Any, ratio: Any = 1.0, refines: bool = False
    ) -> tuple[LossParts, Tensor]:
        return super().sums(raw_maps, targets, positives, ratio, True)


REFINING = LastEpochs(WIDE_HEADS, YOLOX)
BINNED = YoloxLoss([replace(head, box_bins=4) for head in ONE_ANCHOR], YOLOX)  # some targets are larger
ALIGNED = replace(YOLOX, positives_by=PositivesBy.alignment)
CHOICES: dict[str, YoloLoss | YoloxLoss] = {
    "yolov3": YoloLoss(HEADS, CONFIG),
    "yolox": YoloxLoss(WIDE_HEADS, YOLOX),
    "yolox, last epochs": REFINING,
    "yolox, one anchor": YoloxLoss(ONE_ANCHOR, YOLOX),
    "yolox, aligned": YoloxLoss(WIDE_HEADS, ALIGNED),
}
LOSSES: dict[str, HeadLoss] = {
    **CHOICES,
    **{f"darknet {name}": DarknetLoss(of_darknet.CASES[name]) for name in ("yolov3", "yolov4", "yolov4-csp", "diou")},
}
EACH = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


VARIANTS = [
    *[YoloLoss(HEADS, replace(CONFIG, iou=kind)) for kind in IouKind],
    YoloLoss(HEADS, replace(CONFIG, anchor_iou=0.5)),
    *[YoloxLoss(WIDE_HEADS, replace(YOLOX, iou=kind)) for kind in IouKind],
    BINNED,
    *[YoloxLoss(ONE_ANCHOR, replace(YOLOX, positives=positives)) for positives in (1, 3, 1000)],
    *[YoloxLoss(WIDE_HEADS, replace(ALIGNED, positives=positives)) for positives in (1, 1000)],
    YoloLoss([replace(head, num_classes=1) for head in HEADS], CONFIG),
    YoloxLoss([replace(head, num_classes=1) for head in WIDE_HEADS], YOLOX),
]


@pytest.mark.parametrize("loss", [*CHOICES.values(), *VARIANTS], ids=lambda loss: str(loss.config))
@pytest.mark.parametrize("ratio", [1.0, 0.3])
def test_equals_the_plain_reference(loss: YoloLoss | YoloxLoss, ratio: float) -> None:
    maps, many = random_maps(3, loss.heads), random_targets(40, 3)
    many[:, 1] %= loss.heads[0].num_classes
    raw, refines = [each.tolist() for each in maps], isinstance(loss, LastEpochs)
    for targets in (many, many[:1]):  # less than one positive an image
        parts = loss(maps, targets, objectness_ratio=ratio)
        expected = yolo_loss(raw, targets.tolist(), loss.heads, loss.config, ratio, refines=refines)
        torch.testing.assert_close(torch.stack(parts[1:]), torch.tensor(expected), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(parts.total, sum(parts[1:]))


@pytest.mark.parametrize("loss", [*CHOICES.values(), BINNED], ids=[*CHOICES, "yolox, bins"])
@pytest.mark.parametrize("ratio", [1.0, 0.3])
def test_gradient_is_the_references_with_constant_targets(loss: YoloLoss | YoloxLoss, ratio: float) -> None:
    """Neither these targets nor the choice of positives pass a gradient on."""
    maps, targets = [raw.double().requires_grad_() for raw in random_maps(1, loss.heads)], random_targets(12, 1)
    gradients = torch.autograd.grad(loss(maps, targets, objectness_ratio=ratio).total, maps)
    given, step = {"fixed_maps": [raw.tolist() for raw in maps], "refines": isinstance(loss, LastEpochs)}, 1e-5
    for values in (slice(0, -4), slice(-4, -3), slice(-3, None)):  # boxes, objectness, three classes
        direction = [torch.zeros_like(raw) for raw in maps]
        for part in direction:
            part[..., values].normal_()
        before, after = (
            sum(yolo_loss(moved, targets.tolist(), loss.heads, loss.config, ratio, **given))
            for moved in (
                [(raw + size * part).tolist() for raw, part in zip(maps, direction, strict=True)]
                for size in (-step, step)
            )
        )
        slope = sum(float((one * part).sum()) for one, part in zip(gradients, direction, strict=True))
        assert slope == pytest.approx((after - before) / (2 * step), rel=1e-4, abs=1e-4)


def test_a_loss_refuses_heads_that_are_not_for_it() -> None:
    with pytest.raises(ModelError, match="fix: loss=yolov3"):
        YoloxLoss(HEADS, YOLOX)
    with pytest.raises(ModelError, match="fix: loss=yolox"):
        YoloLoss([replace(head, parts=(RawPart(1, 5, 0), RawPart(2, 0, 1))) for head in ONE_ANCHOR], CONFIG)
    with pytest.raises(ModelError, match=r"fix: model\.box_bins=0"):
        DarknetLoss(BINNED.heads)


@pytest.mark.parametrize("loss", CHOICES.values(), ids=CHOICES)
def test_a_box_with_two_labels_is_one_object_that_learns_both(loss: HeadLoss) -> None:
    maps, targets = [raw.requires_grad_() for raw in random_maps(2, loss.heads)], random_targets(20, 2)
    twice = torch.cat((targets, targets[:7]))
    for one, other in zip(loss(maps, targets), loss(maps, twice), strict=True):
        torch.testing.assert_close(one, other)
    other = torch.cat((targets, torch.tensor([[0, 1, 70, 45, 38, 29], [0, 2, 70, 45, 38, 29]])))
    both, single = loss(maps, other), loss(maps, other[:-1])
    assert both.box.equal(single.box) and both.objectness.equal(single.objectness)
    gradients = torch.autograd.grad(both.total - single.total, maps)
    assert min(gradient[..., -1].min() for gradient in gradients) < -1e-3, "the other class is pushed up"
    assert all((gradient[..., :-1].abs() < 1e-5).all() for gradient in gradients), "nothing else changes"


@pytest.mark.parametrize("options", [YOLOX, ALIGNED], ids=["cost", "alignment"])
def test_of_candidates_that_predict_the_same_the_first_learns(options: YoloxLossConfig) -> None:
    loss = YoloxLoss(
        [replace(head, anchors=head.anchors * 2) for head in ONE_ANCHOR[:1]], replace(options, positives=3)
    )
    alike, differ = random_maps(1, ONE_ANCHOR[:1])[0].repeat(1, 2, 1, 1, 1).requires_grad_(), 0
    for target in random_targets(6, 1).split(1):
        (gradient,) = torch.autograd.grad(loss([alike], target).total, alike)
        first, second = gradient[0, ..., 4]
        assert (first <= second).all()
        differ += int((first < second).any())
    assert differ > 0


@EACH
@pytest.mark.parametrize("rows", [0, 3])
def test_no_targets_or_rows_of_zeros_are_background_only(loss: HeadLoss, rows: int) -> None:
    maps = [raw.requires_grad_() for raw in random_maps(2, loss.heads)]
    parts = loss(maps, torch.zeros(rows, 6))
    assert parts.box == 0 and parts.classification == 0 and parts.objectness > 0
    parts.total.backward()
    for raw in maps:
        assert (raw.grad[..., 4] > 0).all() and (raw.grad[..., :4] == 0).all() and (raw.grad[..., 5:] == 0).all()


@pytest.mark.parametrize("loss", [*LOSSES.values(), BINNED], ids=[*LOSSES, "yolox, bins"])
def test_a_step_has_one_gradient_in_any_micro_batches(loss: HeadLoss) -> None:
    maps = [raw.double().requires_grad_() for raw in random_maps(8, loss.heads)]
    targets = random_targets(30, 5)
    targets[:20, 0] = 0
    whole = loss(maps, targets)
    gradients = torch.autograd.grad(whole.total, maps)
    for size in (1, 2, 4):
        total, divisor = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for start in range(0, 8, size):
            inside = (targets[:, 0] >= start) & (targets[:, 0] < start + size)
            of_pass = targets[inside]
            of_pass[:, 0] -= start
            parts, share = loss.sums(
                [raw[start : start + size] for raw in maps], of_pass, loss.count_positives(targets) / 8
            )
            total, divisor = total + parts.total, divisor + share
        total = total / divisor.clamp(min=8)
        torch.testing.assert_close(total, whole.total, rtol=1e-9, atol=0)
        for one, other in zip(torch.autograd.grad(total, maps), gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@EACH
def test_perfect_maps_have_no_box_loss_and_decode_to_the_target(loss: HeadLoss) -> None:
    box = torch.tensor([70.0, 45.0, 38.0, 29.0])  # most like an anchor that both of Darknet's heads have
    maps = [torch.full_like(raw, -20) for raw in random_maps(1, loss.heads)]
    for raw, head in zip(maps, loss.heads, strict=True):
        cell = (box[:2] / head.stride).floor()
        raw[0, :, int(cell[1]), int(cell[0]), 4:6] = 20
        offset = (box[:2] / head.stride - cell + (head.scale_x_y - 1) / 2) / head.scale_x_y
        size = box[2:] / torch.tensor(head.anchors)
        raw_size = (size.sqrt() / 2).logit() if head.new_coords else size.log()
        raw[0, :, int(cell[1]), int(cell[0]), :4] = torch.cat((offset.logit().expand_as(raw_size), raw_size), 1)
    parts = loss(maps, torch.cat((torch.zeros(2), box))[None])
    assert parts.box.abs() < 1e-4 and parts.classification < 1e-4
    boxes, scores = decode(maps, loss.heads)
    found = boxes[0][scores[0, :, 0] > 0.5]
    torch.testing.assert_close(
        found, cxcywh_to_xyxy(box).expand(sum(len(head.anchors) for head in loss.heads), 4), rtol=1e-4, atol=1e-3
    )


@EACH
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_gradients_stay_finite(loss: HeadLoss, scale: float) -> None:
    maps = [(raw * scale).requires_grad_() for raw in random_maps(2, loss.heads)]
    parts = loss(maps, random_targets(50, 2))
    parts.total.backward()
    assert parts.total.isfinite() and all(raw.grad.isfinite().all() for raw in maps)


@EACH
def test_half_precision_maps_are_computed_in_float32(loss: HeadLoss) -> None:
    maps, targets = [raw.bfloat16() for raw in random_maps(2, loss.heads)], random_targets(20, 2)
    with torch.autocast("cpu", torch.bfloat16):
        parts = loss(maps, targets)
    assert parts.total.dtype == torch.float32
    assert parts.total.equal(loss([raw.float() for raw in maps], targets).total)


@pytest.mark.release
def test_bins_are_one_graph() -> None:
    maps, targets = random_maps(2, BINNED.heads), random_targets(9, 2)
    compiled = torch.compile(BINNED.__call__, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(maps, targets).total, BINNED(maps, targets).total)


def test_a_subclass_changes_terms_by_their_names() -> None:
    class Doubled(YoloLoss):
        def terms(self, inputs: LossInputs) -> tuple[list[Terms], Weights]:
            terms, weights = super().terms(inputs)
            return [{**of_head, name: 2 * of_head["objectness"]} for of_head in terms], {name: 64.3, **weights}

    maps, targets, name = random_maps(2, HEADS), random_targets(9, 2), "objectness"
    plain, doubled = YoloLoss(HEADS, CONFIG)(maps, targets), Doubled(HEADS, CONFIG)(maps, targets)
    assert doubled[1:] == plain._replace(objectness=2 * plain.objectness)[1:]
    torch.testing.assert_close(doubled.total, plain.total + plain.objectness)
    name = "objectnes"
    with pytest.raises(TypeError, match="objectnes"):  # a term without a column
        Doubled(HEADS, CONFIG)(maps, targets)
