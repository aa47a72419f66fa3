"""Layers by loops, or by torch with everything explicit; activations by Darknet's formulas."""

import copy
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models import Darknet, parse_cfg
from models.darknet import fuse_batch_norm
from models.layers import ACTIVATIONS, Convolution, Dropout, MaxPool, Product, Reorg, SharedConvolution, Shortcut
from models.weights import weight_tensors
from tests.models.cfg_writer import conv, route, section, shortcut

Array = npt.NDArray[np.float64]


def network(layers: str, head_reads: int = -1) -> Darknet:
    head = f"[route]\nlayers={head_reads}\n[convolutional]\nfilters=7\nactivation=linear\n"
    head += "[yolo]\nmask=0\nanchors=4,6\nclasses=2\n"
    return Darknet(parse_cfg(f"[net]\nchannels=3\n{layers}\n{head}", "layers.cfg"))


def convolved(x: Array, weight: Array, stride: int, padding: int, dilation: int, *, rim: float) -> Array:
    """Convolve one image (channels, rows, columns), padded with the value `rim`, in float64."""
    padded = F.pad(torch.from_numpy(x).double(), (padding,) * 4, value=rim)
    groups = len(padded) // weight.shape[1]
    kernels = torch.from_numpy(weight).double()
    return F.conv2d(padded[None], kernels, stride=stride, dilation=dilation, groups=groups)[0].numpy()


@pytest.mark.parametrize(
    ("options", "stride", "padding", "dilation"),
    [
        ("size=3\npad=1\ndilation=2", 1, 2, 2),
        ("size=3\npad=1\ndilation=3\nstride=2", 2, 3, 3),
        ("size=1\npad=1\ndilation=3", 1, 0, 1),
        ("size=7\nstride=2\npad=1", 2, 3, 1),
        ("size=3\npadding=1\ngroups=2", 1, 1, 1),
        ("size=5\npad=1\ngroups=4\npadding=7", 1, 2, 1),
    ],
)
def test_convolution_with_everything_explicit(options: str, stride: int, padding: int, dilation: int) -> None:
    model = network(
        f"[convolutional]\nfilters=4\nactivation=linear\n[convolutional]\nfilters=8\nactivation=tanh\n{options}"
    )
    x = torch.randn(1, 4, 6, 8)
    conv = model.layers[1].conv
    plain = convolved(x[0].numpy(), conv.weight.detach().numpy(), stride, padding, dilation, rim=0.0)
    expected = np.tanh(plain + conv.bias.detach().numpy()[:, None, None])
    out = model.layers[1](x)[0].detach()
    torch.testing.assert_close(out.double(), torch.from_numpy(expected), rtol=1e-4, atol=1e-6)
    assert model.shapes[1].size((12, 16)) == (12 // stride, 16 // stride)


@pytest.mark.parametrize("stride", [1, 2])
def test_xnor_convolution_works_on_signs(stride: int) -> None:
    options = f"filters=6\nsize=3\npad=1\nstride={stride}\nbatch_normalize=1\nactivation=leaky"
    model = network(f"[convolutional]\nxnor=1\n{options}").eval()
    layer = model.layers[0]
    assert isinstance(layer, Convolution) and layer.norm is not None
    with torch.no_grad():
        for tensor in (layer.norm.running_mean, layer.norm.bias):
            tensor.normal_()
        for tensor in (layer.norm.running_var, layer.norm.weight):
            tensor.uniform_(0.5, 1.5)
    x = torch.randn(1, 3, 6, 4)
    x[0, 0, 0, 0] = 0.0  # counts as -1
    weight = layer.conv.weight.detach().double().numpy()
    # As Darknet: batch norm goes into the weights, then each filter becomes its mean magnitude
    # times signs, and the padding is -1, too.
    scale = (layer.norm.weight / (layer.norm.running_var + layer.norm.eps).sqrt()).detach().double().numpy()
    fused = weight * scale[:, None, None, None]
    binary = np.abs(fused).mean((1, 2, 3), keepdims=True) * np.where(fused > 0, 1, -1)
    bias = layer.norm.bias.detach().double().numpy() - scale * layer.norm.running_mean.double().numpy()
    signs = np.where(x[0].numpy() > 0, 1.0, -1.0)
    expected = convolved(signs, binary, stride, 1, 1, rim=-1.0) + bias[:, None, None]
    expected = np.where(expected > 0, expected, 0.1 * expected)
    torch.testing.assert_close(layer(x)[0].double().detach(), torch.from_numpy(expected), rtol=1e-4, atol=1e-5)


def test_fusing_folds_batch_norm_and_leaves_binary_convolutions_alone() -> None:
    model = network(conv(6, 3) + conv(8, 3, xnor=1) + conv(4, 3)).eval()
    model.layers[0].fused_norm = lambda *_: pytest.fail("the kernels of training")
    with torch.no_grad():
        for name, tensor in model.named_buffers():
            if name.endswith(("mean", "var")):
                tensor.uniform_(0.5, 1.5)
        for layer in model.layers[:3]:
            layer.norm.weight.uniform_(-1.5, 1.5)
        fused, images = fuse_batch_norm(model), torch.rand(2, 3, 8, 8)
        torch.testing.assert_close(fused(images)[0], model(images)[0], rtol=1e-4, atol=1e-5)
    assert [layer.norm is None for layer in fused.layers[:3]] == [True, False, True]


# Layer 1 lends its tensors to layers 2 and 4, as resnet152_trident does; all maps have 4 channels.
SHARING = (
    section("convolutional", filters=4, activation="linear")
    + conv(4, 3, dilation=3)
    + conv(4, 3, 2, "relu", share_index=-1, dilation=2)
    + route(1)
    + conv(4, 3, 2, "linear", share_index=2)
    + shortcut(2)
)


def test_shared_convolution_has_its_own_geometry() -> None:
    model = network(SHARING).eval()
    owner, second, third = model.layers[1], model.layers[2], model.layers[4]
    assert isinstance(second, SharedConvolution) and isinstance(third, SharedConvolution)
    assert second.source is owner and third.source is owner  # the last names layer 2, which shares itself
    x = torch.randn(1, 4, 8, 8)
    conv, norm = owner.conv, owner.norm
    for layer, stride, dilation, activation in ((second, 2, 2, F.relu), (third, 2, 1, nn.Identity())):
        expected = activation(norm(F.conv2d(x, conv.weight, None, stride, dilation, dilation)))  # type: ignore[misc]
        torch.testing.assert_close(layer(x), expected)
    assert [shape.size((16, 16)) for shape in model.shapes[1:6]] == [(16, 16), (8, 8), (16, 16), (8, 8), (8, 8)]


def test_shared_tensors_are_held_and_stored_once_and_a_copy_shares_its_own() -> None:
    model = network(SHARING).eval()
    assert sum(name.endswith("norm.weight") for name in model.state_dict()) == 1
    assert len(list(model.parameters())) == 2 + 3 + 2
    assert [layer for layer, name, _ in weight_tensors(model) if name.endswith("conv.weight")] == [0, 1, 7]
    twin = copy.deepcopy(model)
    assert twin.layers[2].source is twin.layers[1] and twin.layers[2].source is not model.layers[1]


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def softplus(x: float) -> float:
    return x if x > 20 else math.exp(x) if x < -20 else math.log1p(math.exp(x))


# Darknet's activations.h, with its constants.
FORMULAS: dict[str, Callable[[float], float]] = {
    "linear": lambda x: x,
    "leaky": lambda x: x if x > 0 else 0.1 * x,
    "relu": lambda x: max(x, 0),
    "relu6": lambda x: min(max(x, 0), 6),
    "logistic": logistic,
    "mish": lambda x: x * math.tanh(softplus(x)),
    "swish": lambda x: x * logistic(x),
    "silu": lambda x: x * logistic(x),  # another name of it
    "elu": lambda x: x if x >= 0 else math.exp(x) - 1,
    "selu": lambda x: 1.0507 * x if x >= 0 else 1.0507 * 1.6732 * (math.exp(x) - 1),
    "gelu": lambda x: 0.5 * x * (1 + math.tanh(0.797885 * x + 0.035677 * x**3)),
    "tanh": math.tanh,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_equals_darknets_formula(name: str) -> None:
    x = torch.cat((torch.arange(-30.0, 30.5, 0.5), torch.randn(400) * 4))
    expected = torch.tensor([FORMULAS[name](value) for value in x.double().tolist()], dtype=torch.float64)
    torch.testing.assert_close(ACTIVATIONS[name]()(x.clone()).double(), expected, rtol=1e-4, atol=2e-6)
    value = (torch.randn(60, dtype=torch.float64) * 3).requires_grad_()  # no draw is near a kink
    assert torch.autograd.gradcheck(lambda value: ACTIVATIONS[name]()(value * 1), value)  # * 1: some work in place


@pytest.mark.parametrize("channels", [(4, 4), (4, 2), (4, 6), (4, 1, 6)])
def test_shortcut_adds_the_channels_that_both_have(channels: tuple[int, ...]) -> None:
    sources = [torch.randn(2, count, 3, 5) for count in channels]
    expected = sources[0].numpy().copy()
    for source in sources[1:]:
        for channel in range(min(channels[0], source.shape[1])):
            expected[:, channel] += source[:, channel].numpy()
    before = [source.clone() for source in sources]
    out = Shortcut("leaky")(*sources)
    torch.testing.assert_close(out, torch.from_numpy(np.where(expected > 0, expected, 0.1 * expected)))
    assert all(source.equal(old) for source, old in zip(sources, before, strict=True))


def test_product_of_maps_and_of_channels() -> None:
    x, attention, factors = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5), torch.randn(2, 3, 1, 1)
    for first in (attention, factors):
        assert Product("relu")(first, x).equal(torch.from_numpy(np.maximum(x.numpy() * first.numpy(), 0)))


def darknet_pool(x: Array, size: int, stride: int, padding: int) -> Array:
    """Pool as maxpool_layer.c: window i begins at i * stride - padding // 2, clipped to the map."""
    channels, rows, columns = x.shape
    out = np.zeros((channels, *((n + padding - size) // stride + 1 for n in (rows, columns))))
    for channel, row, column in np.ndindex(out.shape):
        top, left = row * stride - padding // 2, column * stride - padding // 2
        out[channel, row, column] = x[
            channel, max(top, 0) : max(top + size, 0), max(left, 0) : max(left + size, 0)
        ].max()
    return out


POOLS = [
    *[(size, stride, size - 1) for size in range(2, 14) for stride in (1, 2) if stride <= size],
    *[(size, stride, size - 1) for size, stride in ((4, 4), (8, 8), (16, 16), (9, 3), (3, 4), (1, 2))],
    *[(2, 2, 0), (3, 2, 1), (3, 3, 0), (5, 4, 1), (6, 4, 2), (6, 4, 3)],
]


@pytest.mark.parametrize(("size", "stride", "padding"), POOLS)
def test_pools_place_their_windows_as_darknet(size: int, stride: int, padding: int) -> None:
    for rows, columns in ((3 * stride, 2 * stride), (stride, stride), (7 * stride, 13 * stride)):
        x = torch.randn(1, 2, rows, columns, dtype=torch.float64) - 2  # negative: padding by 0 would show
        expected = darknet_pool(x[0].numpy(), size, stride, padding)
        assert MaxPool(size, stride, padding)(x)[0].equal(torch.from_numpy(expected))


@pytest.mark.parametrize(("channels", "stride"), [(4, 2), (3, 1), (32, 4)])
def test_reorg_orders_values_as_darknets_index_arithmetic(channels: int, stride: int) -> None:
    x = torch.randn(1, channels, 2 * stride, 3 * stride, dtype=torch.float64)
    flat, out = x[0].numpy().ravel(), np.zeros((channels * stride**2, 2, 3))
    for k, row, column in np.ndindex(out.shape):  # reorg_cpu with forward=0
        offset, channel = divmod(k, channels)
        w2, h2 = column * stride + offset % stride, row * stride + offset // stride
        out[k, row, column] = flat[w2 + 3 * stride * (h2 + 2 * stride * channel)]
    assert Reorg(stride)(x)[0].equal(torch.from_numpy(out))


def test_each_rank_drops_what_one_alone_drops_of_its_images() -> None:
    layer, x = Dropout(0.25), torch.rand(8, 40, 9, 7, dtype=torch.float64) + 1
    results = []
    for place in ((0, 1, 2), (0, 2, 2), (1, 2, 2)):
        layer.place = place
        torch.manual_seed(1)
        images = x.view(-1, place[1], 2, 40, 9, 7)[:, place[0]].flatten(0, 1)
        results.append(layer(images))
        assert torch.equal(results[-1], torch.where(results[-1] == 0, 0, images * (1 / 0.75)))
    whole, *parts = results
    assert torch.equal(whole.view(2, 2, 2, 40, 9, 7), torch.stack([part.view(2, 2, 40, 9, 7) for part in parts], 1))
    assert (whole == 0).double().mean() == pytest.approx(0.25, abs=0.01) and torch.equal(layer.eval()(x), x)
    assert not Dropout(1.0)(x).any()
