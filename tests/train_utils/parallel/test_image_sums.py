"""Image-by-image training: torch's gradients, and the same bits however images are dealt."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from models import Darknet, DarknetLoss, IouKind, LossConfig, YoloLoss, zoo_cfg
from models.config import Balance, PositivesBy
from train_utils.parallel.by_image import Images
from train_utils.parallel.image_sums import ImageSummed, ImagewiseLoss
from train_utils.parallel.wrap import convert_sync_batchnorm, gradient_sync, wrap_model
from train_utils.processes.world import World

CPU = torch.device("cpu")
ALONE = World(0, 0, 1, 1, node_rank=0, num_nodes=1, device=CPU, launcher="none", backend="none")


def on_shares(model: Darknet, images: Tensor, weights: Sequence[Tensor], ranks: int) -> dict[str, Tensor]:
    """Gradients of a batch dealt to ``ranks``, which run in turn."""
    wrapped = wrap_model(copy.deepcopy(model), ALONE, 0, lambda total: total)
    assert isinstance(wrapped, ImageSummed)
    for rank in range(ranks):
        maps = wrapped(images[rank::ranks])
        total = sum(
            (raw * share).sum()
            for each, weight in zip(maps, weights, strict=True)
            for raw, share in zip(each.each, weight[rank::ranks].split(1), strict=True)
        )
        assert isinstance(total, Tensor)
        total.backward()
    wrapped.finish()
    return {name: p.grad for name, p in wrapped.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["yolov3-tiny", "yolov4-tiny"])
def test_a_network_s_gradients_have_the_same_bits_however_its_images_are_dealt(name: str) -> None:
    """Batch-norm statistics are fixed here; tests/runs/test_world_size.py uses real ranks."""
    torch.manual_seed(0)
    model = Darknet(zoo_cfg(name), num_classes=2, width=0.125).to(memory_format=torch.channels_last)
    images = torch.rand(8, 3, 64, 96).to(memory_format=torch.channels_last)
    weights = [torch.randn(raw.shape) for raw in model(images)]
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    expected = on_shares(model, images, weights, 1)
    sum((raw * weight).sum() for raw, weight in zip(model(images), weights, strict=True)).backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(expected[key], parameter.grad, rtol=1e-3, atol=1e-3)
    assert len(expected) > 10
    for ranks in (2, 4, 8):
        found = on_shares(model, images, weights, ranks)
        assert found.keys() == expected.keys()
        assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


def test_parameters_used_in_any_way_get_their_gradients_and_frozen_ones_none() -> None:
    """A kernel shared by two convolutions, a factor, and kernels computed from others."""
    conv, scale = nn.Conv2d(3, 3, 1), nn.Parameter(torch.full((3, 1, 1), 2.0))
    frozen = nn.Conv2d(3, 3, 1).requires_grad_(False)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.frozen, self.scale = conv, frozen, scale

        def forward(self, x: Tensor) -> list[Tensor]:
            shared = nn.functional.conv2d(x, self.conv.weight.abs().mean(0, keepdim=True) * self.conv.weight)
            return [self.conv(self.frozen(x)) * self.scale + shared]

    plain = Twice().double()
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    plain(x)[0].square().sum().backward()
    expected = {name: None if p.grad is None else p.grad.clone() for name, p in plain.named_parameters()}
    plain.zero_grad()
    parameters = dict(plain.named_parameters())
    wrapped = wrap_model(plain, ALONE, 0, lambda total: 2 * total)
    assert isinstance(wrapped, ImageSummed)
    torch.cat(wrapped(x)[0].each).square().sum().backward()
    wrapped.finish()
    assert all(parameter is parameters[name] for name, parameter in plain.named_parameters())
    for name, parameter in parameters.items():
        if "frozen" in name:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, 2 * expected[name], rtol=1e-9, atol=1e-9)


def test_a_copy_does_not_share_its_sums() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    wrapped = wrap_model(convert_sync_batchnorm(model, ALONE, lambda t: t[None]), ALONE, 0, lambda total: total)
    copied = copy.deepcopy(wrapped)
    assert isinstance(wrapped, ImageSummed) and isinstance(copied, ImageSummed)
    torch.cat(wrapped(torch.randn(2, 3, 8, 8)).each).sum().backward()
    copied.finish()
    assert all((parameter.grad == 0).all() for parameter in copied.parameters())
    wrapped.finish()
    assert wrapped.module[0].weight.grad.abs().sum() > 0


def test_under_autocast_maps_are_bfloat16_and_gradients_those_of_the_float32_weights() -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(8, 16, 3, padding=1)
    wrapped = wrap_model(copy.deepcopy(plain), ALONE, 0, lambda total: total)
    x, weights = torch.randn(4, 8, 12, 12), torch.randn(4, 16, 12, 12)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = torch.cat(wrapped(x).each), plain(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    for maps in (y, expected):
        (maps * weights).sum().backward()
    assert isinstance(wrapped, ImageSummed)
    wrapped.finish()
    for one, other in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and one.grad.dtype == torch.float32
        torch.testing.assert_close(one.grad, other.grad, rtol=2e-2, atol=0.5)


def test_a_gradient_that_is_too_large_to_be_summed_exactly_is_told() -> None:
    layer = nn.Conv2d(1, 1, 1)
    wrapped = wrap_model(layer, ALONE, 0, lambda total: total)
    assert isinstance(wrapped, ImageSummed)
    (wrapped(torch.ones(2, 1, 1, 1)) * 1e5).sum().backward()
    with pytest.warns(UserWarning, match=r"train\.deterministic.*2e\+05"):
        wrapped.finish()
    assert layer.weight.grad is not None and float(layer.weight.grad) == 2e5


class Draws(nn.Module):
    """A layer that draws random numbers for all images at once."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(1)


def test_drawn_numbers_are_those_of_seed_step_and_image() -> None:
    x, dropout = torch.ones(4, 2, 8, 8), nn.Dropout(0.5)

    def masks(seed: int, step: int, indices: list[int]) -> dict[int, Tensor]:
        wrapped = wrap_model(nn.Sequential(dropout, nn.Identity(), dropout), ALONE, seed, lambda total: total)
        before = torch.get_rng_state()
        with gradient_sync(wrapped, False, step, indices):
            maps = wrapped(x[: len(indices)])
        assert torch.equal(torch.get_rng_state(), before)
        return dict(zip(indices, maps.each, strict=True))

    together, others = masks(1, 5, [7, 3, 9]), masks(1, 5, [9, 2])
    assert torch.equal(together[9], others[9]) and 0.1 < float((together[9] == 0).float().mean()) < 0.95
    different = [together[7], together[3], together[9], masks(2, 5, [9])[9], masks(1, 6, [9])[9]]
    assert all(not torch.equal(a, b) for number, a in enumerate(different) for b in different[:number])
    with pytest.raises(AssertionError, match="drew numbers for all images at once"):
        wrap_model(Draws(), ALONE, 1, lambda total: total)(x)


def test_the_loss_image_by_image_is_that_of_the_batch() -> None:
    """Means over positives, cells and images, including an image without objects."""
    model = Darknet(zoo_cfg("yolov3-tiny"), num_classes=2, width=0.125)
    raw_maps = [raw.double() for raw in model(torch.rand(4, 3, 64, 64))]
    targets = torch.tensor(
        [[0, 1, 20, 30, 25, 30], [0, 0, 40, 30, 12, 9], [2, 1, 50, 12, 20, 22], [3, 0, 9, 8, 7, 9.0]]
    )
    config = LossConfig("yolov3", 3.5, 64.0, 37.0, IouKind.giou, 0.2, None, Balance.equal, PositivesBy.shape, None)
    for loss in (
        *(YoloLoss(model.heads, replace(config, balance=balance)) for balance in Balance),
        DarknetLoss(model.heads),
    ):
        expected = loss(raw_maps, targets, 0.5, lambda counts: 3 * counts, 3)
        each = [Images(raw.split(1), [torch.get_rng_state()] * 4) for raw in raw_maps]
        found = ImagewiseLoss(loss)(
            each, targets, objectness_ratio=0.5, sum_over_ranks=lambda counts: 3 * counts, world_size=3
        )
        torch.testing.assert_close(tuple(found), tuple(expected), rtol=1e-6, atol=0)
