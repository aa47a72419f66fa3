"""Convolutions that sum gradients image by image: torch's own gradients, and the same bits however images are dealt."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from models import Darknet, zoo_cfg
from train_utils.data_parallel import convert_sync_batchnorm, wrap_model
from train_utils.image_sums import GradientSums, ImageSummed, ImagewiseConv2d
from train_utils.world import World

CPU = torch.device("cpu")
ALONE = World(0, 0, 1, 1, node_rank=0, num_nodes=1, device=CPU, launcher="none", backend="none")
CONVOLUTIONS = {
    "plain": {"kernel_size": 3, "padding": 1, "bias": False},
    "with bias": {"kernel_size": 1},
    "strides, dilation, groups": {"kernel_size": 3, "stride": (2, 1), "padding": 2, "dilation": 2, "groups": 2},
}
SHAPE = (8, 4, 13, 9)


def gradients(layer: nn.Module, x: Tensor, weights: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Of two passes over (x, weights): the maps' gradient of the last one, and those of the parameters."""
    for _ in range(2):
        x = x.detach().requires_grad_()
        (layer(x) * weights).sum().backward()
    if isinstance(layer, ImagewiseConv2d):
        assert isinstance(layer.sums, GradientSums)
        assert all(parameter.grad is None for parameter in layer.parameters())
        layer.sums.finish(layer, lambda total: total)
    assert x.grad is not None
    return x.grad, [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_it_is_torch_s_convolution(options: dict[str, object], dtype: torch.dtype, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(4, 6, **options).to(dtype).to(memory_format=layout)  # type: ignore[arg-type]
    imagewise = ImagewiseConv2d(copy.deepcopy(plain), GradientSums())
    assert imagewise.state_dict().keys() == plain.state_dict().keys() and str(imagewise.stride) == str(plain.stride)
    x = torch.randn(SHAPE, dtype=dtype).to(memory_format=layout)
    y = plain(x)
    assert imagewise(x).is_contiguous(memory_format=layout)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(imagewise(x), y, rtol=tolerance, atol=tolerance)
    weights = torch.randn_like(y)
    (of_x, of_parameters), (expected_x, expected) = gradients(imagewise, x, weights), gradients(plain, x, weights)
    torch.testing.assert_close(of_x, expected_x, rtol=tolerance, atol=tolerance)
    assert len(of_parameters) == len(expected) == 1 + (plain.bias is not None)
    for one, other in zip(of_parameters, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=20 * tolerance)
    assert torch.equal(imagewise.eval()(x), plain.eval()(x))


def on_shares(model: Darknet, images: Tensor, weights: Sequence[Tensor], ranks: int) -> dict[str, Tensor]:
    """Gradients of the whole batch dealt to ``ranks``, which pass one after the other as micro-batches do."""
    wrapped = wrap_model(copy.deepcopy(model), ALONE, True, lambda total: total)
    assert isinstance(wrapped, ImageSummed)
    for rank in range(ranks):
        maps = wrapped(images[rank::ranks])
        assert all(raw.dtype == torch.float64 for raw in maps)
        sum((raw * weight[rank::ranks]).sum() for raw, weight in zip(maps, weights, strict=True)).backward()
    wrapped.finish()
    return {name: p.grad for name, p in wrapped.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["yolov3-tiny", "yolov4-tiny"])
def test_a_network_s_gradients_have_the_same_bits_however_its_images_are_dealt(name: str) -> None:
    """With the statistics of batch norm fixed; tests/test_world_size.py has them over real processes."""
    torch.manual_seed(0)
    model = Darknet(zoo_cfg(name), num_classes=2, width=0.125).to(memory_format=torch.channels_last)
    images = torch.rand(8, 3, 64, 96).to(memory_format=torch.channels_last)
    weights = [torch.randn(raw.shape, dtype=torch.float64) for raw in model(images)]
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    expected = on_shares(model, images, weights, 1)
    sum((raw * weight).sum() for raw, weight in zip(model(images), weights, strict=True)).backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(expected[key], parameter.grad, rtol=1e-3, atol=1e-3)
    convolutions = {key for key in expected if key.endswith(("conv.weight", "conv.bias"))}
    assert len(convolutions) > 10
    for ranks in (2, 4, 8):
        found = on_shares(model, images, weights, ranks)
        assert found.keys() == expected.keys()
        assert [key for key in convolutions if not torch.equal(found[key], expected[key])] == []


def test_parameters_that_no_layer_sums_keep_their_gradients_and_frozen_ones_get_none() -> None:
    """A convolution whose kernels another layer uses, too, gets the gradients of both."""
    conv, scale = nn.Conv2d(3, 3, 1), nn.Parameter(torch.full((3, 1, 1), 2.0))
    frozen = nn.Conv2d(3, 3, 1).requires_grad_(False)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.frozen, self.scale = conv, frozen, scale

        def forward(self, x: Tensor) -> list[Tensor]:
            shared = nn.functional.conv2d(x, conv.weight, conv.bias)
            return [self.conv(self.frozen(x)) * self.scale + shared]

    plain = Twice().double()
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    plain(x)[0].square().sum().backward()
    expected = {name: None if p.grad is None else p.grad.clone() for name, p in plain.named_parameters()}
    plain.zero_grad()
    wrapped = wrap_model(plain, ALONE, True, lambda total: 2 * total)
    wrapped(x)[0].square().sum().backward()
    assert isinstance(wrapped, ImageSummed)
    wrapped.finish()
    for name, parameter in plain.named_parameters():
        if "frozen" in name:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, 2 * expected[name], rtol=1e-12, atol=1e-12)


def test_a_copy_does_not_share_its_sums() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    wrapped = wrap_model(convert_sync_batchnorm(model, ALONE, lambda t: t[None]), ALONE, True, lambda total: total)
    copied = copy.deepcopy(wrapped)
    assert isinstance(wrapped, ImageSummed) and isinstance(copied, ImageSummed)
    wrapped.module(torch.randn(2, 3, 8, 8)).sum().backward()
    copied.finish()
    assert all((parameter.grad == 0).all() for parameter in copied.parameters())
    wrapped.finish()
    assert wrapped.module[0].weight.grad.abs().sum() > 0


def test_under_autocast_maps_are_bfloat16_and_gradients_those_of_the_float32_weights() -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(8, 16, 3, padding=1)
    imagewise = ImagewiseConv2d(copy.deepcopy(plain), GradientSums())
    x, weights = torch.randn(4, 8, 12, 12), torch.randn(4, 16, 12, 12)
    with torch.autocast("cpu", torch.bfloat16):
        y = imagewise(x)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y, plain(x), rtol=2e-2, atol=2e-2)
        (of_x, of_parameters), (expected_x, expected) = gradients(imagewise, x, weights), gradients(plain, x, weights)
    torch.testing.assert_close(of_x, expected_x, rtol=2e-2, atol=2e-2)
    for one, other in zip(of_parameters, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=2e-2, atol=0.5)
