"""Backbones of timm against a plain forward pass by the names of their tensors."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models import Darknet, ModelError, load_foreign_state_dict, zoo_cfg
from models.layers import Convolution

State = dict[str, Tensor]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # timm.data.constants.IMAGENET_DEFAULT_MEAN and _STD
DEPTHS, CHANNELS = (1, 2, 8, 8, 4), (32, 64, 128, 256, 512, 1024)


def convolutions(csp: bool) -> Iterator[tuple[str, int, int, int]]:
    """The name, inputs, outputs and size of each convolution of a CspNet."""
    yield "stem.conv1", 3, CHANNELS[0], 3
    for number, depth in enumerate(DEPTHS):
        stage, before, channels = f"stages.{number}", CHANNELS[number], CHANNELS[number + 1]
        both = channels * 2 if number == 0 else channels
        yield f"{stage}.conv_down", before, channels, 3
        width, inner = (both // 2, channels // 2) if csp else (channels, channels // 2)
        if csp:
            yield f"{stage}.conv_exp", channels, both, 1
        for block in range(depth):
            inner = inner if number == 0 or not csp else width
            yield f"{stage}.blocks.{block}.conv1", width, inner, 1
            yield f"{stage}.blocks.{block}.conv2", inner, width, 3
        if csp:
            yield f"{stage}.conv_transition_b", width, both // 2, 1
            yield f"{stage}.conv_transition", both, channels, 1


def random_state(csp: bool) -> State:
    state = {"head.fc.weight": torch.rand(10, CHANNELS[-1]), "head.fc.bias": torch.rand(10)}
    for name, before, channels, size in convolutions(csp):
        state[f"{name}.conv.weight"] = torch.randn(channels, before, size, size) / (before * size * size) ** 0.5
        for key, low in (("weight", 0.8), ("bias", -0.2), ("running_mean", -0.2), ("running_var", 0.8)):
            state[f"{name}.bn.{key}"] = torch.empty(channels).uniform_(low, low + 0.4)
        state[f"{name}.bn.num_batches_tracked"] = torch.tensor(7)
    return state


def features(state: State, x: Tensor, csp: bool) -> tuple[Tensor, Tensor]:
    def layer(name: str, x: Tensor, stride: int = 1) -> Tensor:
        kernels = state[f"{name}.conv.weight"]
        x = F.conv2d(x, kernels, stride=stride, padding=kernels.shape[-1] // 2)
        keys = ("running_mean", "running_var", "weight", "bias")
        mean, variance, gamma, beta = (state[f"{name}.bn.{key}"] for key in keys)
        return F.leaky_relu(F.batch_norm(x, mean, variance, gamma, beta, eps=1e-5), 0.1)

    x = first = layer("stem.conv1", (x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None])
    for number, depth in enumerate(DEPTHS):
        stage = f"stages.{number}"
        x = layer(f"{stage}.conv_down", x, 2)
        if csp:
            around, x = layer(f"{stage}.conv_exp", x).chunk(2, dim=1)
        for block in range(depth):
            x = x + layer(f"{stage}.blocks.{block}.conv2", layer(f"{stage}.blocks.{block}.conv1", x))
        if csp:
            x = torch.cat((around, layer(f"{stage}.conv_transition_b", x)), dim=1)
            x = layer(f"{stage}.conv_transition", x)
    return first, x


@pytest.mark.release
@pytest.mark.parametrize(
    ("csp", "network", "last", "count"), [(False, "yolov3-spp-decoupled", 74, 52), (True, "yolov4", 104, 72)]
)
@torch.no_grad()
def test_the_backbone_computes_what_timm_computes(csp: bool, network: str, last: int, count: int) -> None:
    """But for the edges, where zeros are black here and the mean colour in timm."""
    model, state = Darknet(zoo_cfg(network), 2).eval(), random_state(csp)
    for layer in model.layers:
        if isinstance(layer, Convolution):
            layer.activation = torch.nn.LeakyReLU(0.1)  # yolov4 has mish
    report = load_foreign_state_dict(model, state, Path("a.pth"))
    assert len(report.loaded) == count and not report.is_whole
    images = torch.rand(1, 3, 128, 128)
    first, expected = features(state, images, csp)
    maps = {-1: images}
    for index in range(last + 1):
        maps[index] = model.layers[index](*[maps[source] for source in model.sources[index]])
    torch.testing.assert_close(model.layers[0](images)[..., 1:-1, 1:-1], first[..., 1:-1, 1:-1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(maps[last], expected, rtol=0, atol=0.01 * float(expected.abs().max()))


@pytest.mark.release
def test_files_that_do_not_fit_change_nothing() -> None:
    state, key, stem = random_state(csp=False), "stages.1.conv_down.bn.bias", "stem.conv1.conv.weight"
    models = {width: Darknet(zoo_cfg("yolov3"), 2, width) for width in (0.25, 1)}
    for width, changed, message in (
        (0.25, {}, r"layers\.0\.\S+ needs shape"),
        (1, {key: None}, "is not a darknet53"),
        (1, {key: torch.full((128,), float("nan"))}, "not finite"),
        (1, {stem: torch.rand(32, 1, 3, 3)}, "is not a darknet53"),
        (1, {stem: torch.rand(32)}, "is not a darknet53"),
        (1, {stem: torch.rand(32, 3)}, "is not a darknet53"),
        (1, {stem: 7}, "holds no state dict"),
    ):
        model = models[width]
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        wrong = {name: tensor for name, tensor in (state | changed).items() if tensor is not None}
        with pytest.raises(ModelError, match=message):
            load_foreign_state_dict(model, wrong, Path("a.pth"))
        assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
