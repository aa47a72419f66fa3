"""Convolutions against loops, or against torch with everything explicit."""

import copy

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models import Darknet, parse_cfg
from models.layers import Convolution, SharedConvolution, stored_names
from models.weights import weight_tensors
from tests.models.test_pools import blurred

Array = npt.NDArray[np.float64]


def network(layers: str, head_reads: int = -1) -> Darknet:
    """A network of these sections and a head after one of them."""
    head = f"[route]\nlayers={head_reads}\n[convolutional]\nfilters=7\nactivation=linear\n"
    head += "[yolo]\nmask=0\nanchors=4,6\nclasses=2\n"
    return Darknet(parse_cfg(f"[net]\nchannels=3\n{layers}\n{head}", "layers.cfg"))


def convolved(x: Array, weight: Array, strides: tuple[int, int], padding: int, dilation: int, rim: float) -> Array:
    """Convolve one image (channels, rows, columns) by loops, padded with the value `rim`."""
    filters, per_group, size, _ = weight.shape
    x = np.pad(x, ((0, 0), (padding, padding), (padding, padding)), constant_values=rim)
    reach = dilation * (size - 1) + 1
    rows, columns = ((n - reach) // s + 1 for n, s in zip(x.shape[1:], strides, strict=True))
    groups = x.shape[0] // per_group
    out = np.zeros((filters, rows, columns))
    for filter_, row, column in np.ndindex(out.shape):
        first = filter_ // (filters // groups) * per_group
        top, left = row * strides[0], column * strides[1]
        window = x[first : first + per_group, top : top + reach : dilation, left : left + reach : dilation]
        out[filter_, row, column] = (window * weight[filter_]).sum()
    return out


@pytest.mark.parametrize(
    ("options", "strides", "padding", "dilation"),
    [
        ("size=3\npad=1\ndilation=2", (1, 1), 2, 2),
        ("size=3\npad=1\ndilation=3\nstride=2", (2, 2), 3, 3),
        ("size=1\npad=1\ndilation=3", (1, 1), 0, 1),
        ("size=7\nstride=2\npad=1", (2, 2), 3, 1),
        ("size=3\npadding=1\ngroups=2", (1, 1), 1, 1),
        ("size=5\npad=1\ngroups=4", (1, 1), 2, 1),
        ("size=1\nstride=2\nstride_x=2\nstride_y=1\npad=1", (1, 2), 0, 1),
        ("size=3\nstride_x=1\nstride_y=2\npad=1\npadding=7", (2, 1), 1, 1),
    ],
)
def test_convolution_by_loops(options: str, strides: tuple[int, int], padding: int, dilation: int) -> None:
    model = network(
        f"[convolutional]\nfilters=4\nactivation=linear\n[convolutional]\nfilters=8\nactivation=tanh\n{options}",
        head_reads=0,  # a head needs equal strides for rows and columns
    )
    x = torch.randn(1, 4, 6, 8)
    conv = model.layers[1].conv
    by_loops = convolved(x[0].numpy(), conv.weight.detach().numpy(), strides, padding, dilation, 0.0)
    expected = np.tanh(by_loops + conv.bias.detach().numpy()[:, None, None])
    out = model.layers[1](x)[0].detach()
    torch.testing.assert_close(out.double(), torch.from_numpy(expected), rtol=1e-4, atol=1e-6)
    assert model.shapes[1].size((12, 16)) == (12 // strides[0], 16 // strides[1])


@pytest.mark.parametrize(("kind", "size"), [(1, 3), (2, 2)])
def test_antialiasing_strides_behind_the_layer(kind: int, size: int) -> None:
    options = f"stride=2\nantialiasing={kind}"
    convolution = f"[convolutional]\nfilters=4\nsize=3\npad=1\nactivation=leaky\n{options}"
    model = network(f"{convolution}\n[maxpool]\nsize=2\n{options}")
    x = torch.randn(1, 3, 8, 12)
    conv = model.layers[0].conv
    dense = F.leaky_relu(F.conv2d(x, conv.weight, conv.bias, padding=1), 0.1)
    thinned = blurred(dense, size, (2, 2))
    torch.testing.assert_close(model.layers[0](x), thinned)
    pooled = F.max_pool2d(F.pad(thinned, (0, 1, 0, 1), value=float("-inf")), 2, 1)
    torch.testing.assert_close(model.layers[1](thinned), blurred(pooled, size, (2, 2)))
    assert [shape.stride for shape in model.shapes[:2]] == [(2, 2), (4, 4)]


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
    expected = convolved(signs, binary, (stride, stride), 1, 1, -1.0) + bias[:, None, None]
    expected = np.where(expected > 0, expected, 0.1 * expected)
    torch.testing.assert_close(layer(x)[0].double().detach(), torch.from_numpy(expected), rtol=1e-4, atol=1e-5)


def test_gradient_passes_through_the_signs() -> None:
    layer = network("[convolutional]\nxnor=1\nfilters=6\nsize=3\npad=1\nactivation=linear\n").layers[0]
    x = torch.tensor([0.5, -0.5, 2.0]).view(1, 3, 1, 1).expand(1, 3, 4, 4).clone().requires_grad_()
    layer(x).square().sum().backward()
    assert (x.grad[0, :2] != 0).all() and (x.grad[0, 2] == 0).all()  # 2 is outside -1..1
    assert (layer.conv.weight.grad != 0).any()


# Layer 1 lends its tensors to layers 2 and 4, as resnet152_trident does it; all maps have 4
# channels.
SHARING = """[convolutional]
filters=4
activation=linear
[convolutional]
batch_normalize=1
filters=4
size=3
pad=1
dilation=3
activation=leaky
[convolutional]
share_index=-1
batch_normalize=1
filters=4
size=3
stride=2
pad=1
dilation=2
activation=relu
[route]
layers=1
[convolutional]
share_index=2
batch_normalize=1
filters=4
size=3
stride=2
pad=1
activation=linear
[shortcut]
from=2"""


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


def test_shared_tensors_are_held_and_stored_once() -> None:
    model = network(SHARING)
    assert sum(name.endswith("norm.weight") for name in model.state_dict()) == 1
    parameters = list(model.parameters())
    assert len(parameters) == len({id(parameter) for parameter in parameters}) == 2 + 3 + 2
    assert [own.layer for own in weight_tensors(model) if own.name.endswith("conv.weight")] == [0, 1, 7]
    assert stored_names(model.layers[2]) == ()


def test_a_copy_shares_its_own_tensors() -> None:
    model = network(SHARING).eval()
    twin = copy.deepcopy(model)
    assert twin.layers[2].source is twin.layers[1] and twin.layers[2].source is not model.layers[1]
    x = torch.randn(1, 3, 8, 8)
    before = model(x)[0]
    with torch.no_grad():
        twin.layers[1].conv.weight.zero_()
    assert model(x)[0].equal(before) and not twin(x)[0].equal(before)


def test_gradients_of_shared_tensors_add_up() -> None:
    model = network(SHARING).double()
    model.eval()  # batch statistics would tie the uses together
    owner = model.layers[1]
    x = torch.randn(1, 4, 8, 8, dtype=torch.float64)
    parts = []
    for index in (1, 2, 4):
        owner.zero_grad()
        model.layers[index](x).square().sum().backward()
        parts.append(owner.conv.weight.grad.clone())
    owner.zero_grad()
    sum(model.layers[index](x).square().sum() for index in (1, 2, 4)).backward()
    torch.testing.assert_close(owner.conv.weight.grad, sum(parts))


def test_shared_statistics_follow_every_use() -> None:
    model = network(SHARING).train()
    before = model.layers[1].norm.num_batches_tracked.item()
    model(torch.randn(2, 3, 16, 16))
    assert model.layers[1].norm.num_batches_tracked.item() == before + 3
