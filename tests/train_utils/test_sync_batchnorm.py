"""Batch norm over several ranks (threads) against torch's over all maps at once."""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import Darknet, zoo_cfg
from train_utils import sync_batchnorm
from train_utils.distributed import World
from train_utils.sync_batchnorm import ReducedBatchNorm2d, convert_sync_batchnorm

CHANNELS = 7
SHAPES = [(2, CHANNELS, 6, 4), (2, CHANNELS, 5, 5), (1, CHANNELS, 1, 1)]  # of the three ranks
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def on_ranks(monkeypatch: pytest.MonkeyPatch, function: Callable[[int], Any], count: int) -> list[Any]:
    barrier, given, place = threading.Barrier(count, timeout=30), [torch.empty(0)] * count, threading.local()

    def add(tensor: Tensor) -> Tensor:
        given[place.rank] = tensor.detach().clone()
        barrier.wait()
        total = torch.stack(given).sum(0)
        barrier.wait()
        return total

    def run(rank: int) -> Any:
        place.rank = rank
        return function(rank)

    monkeypatch.setattr(sync_batchnorm, "sum_over_ranks", add)
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def plain_norm(dtype: torch.dtype) -> nn.BatchNorm2d:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(CHANNELS, eps=1e-4, momentum=0.3).to(dtype)
    nn.init.uniform_(norm.weight, 0.5, 2)
    nn.init.normal_(norm.bias)
    return norm


def rows(maps: list[Tensor]) -> Tensor:
    return torch.cat([x.detach().double().permute(0, 2, 3, 1).reshape(-1, CHANNELS) for x in maps])[:, :, None, None]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shapes", [SHAPES, SHAPES[:1]], ids=["three ranks", "one rank"])
def test_it_is_torch_s_batch_norm_over_the_maps_of_all_ranks(monkeypatch, shapes, dtype, layout) -> None:
    parameters_dtype = torch.float32 if dtype == torch.bfloat16 else dtype
    start = plain_norm(parameters_dtype)
    maps, grads = (
        [(torch.randn(shape) * 2 + mean).to(dtype).contiguous(memory_format=layout) for shape in shapes]
        for mean in (3, 0)
    )

    def train_one(rank: int) -> tuple[ReducedBatchNorm2d, Tensor, Tensor]:
        norm, x = ReducedBatchNorm2d(copy.deepcopy(start), len(shapes)), maps[rank].clone().requires_grad_()
        for _ in range(2):  # running statistics update twice
            y = norm(x)
        y.backward(grads[rank])
        assert x.grad is not None
        return norm, y, x.grad

    found = on_ranks(monkeypatch, train_one, len(shapes))
    reference, whole = copy.deepcopy(start).double(), rows(maps).requires_grad_()
    for _ in range(2):
        expected = reference(whole)
    expected.backward(rows(grads))

    def close(one: Tensor, other: Tensor | None) -> None:
        torch.testing.assert_close(one.double(), other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])

    norms, outputs, input_grads = zip(*found, strict=True)
    assert all(y.dtype == dtype and y.is_contiguous(memory_format=layout) for y in (*outputs, *input_grads))
    close(rows(outputs), expected.detach())
    close(rows(input_grads), whole.grad)
    close(sum(norm.weight.grad for norm in norms), reference.weight.grad)
    close(sum(norm.bias.grad for norm in norms), reference.bias.grad)
    for name, buffer in reference.named_buffers():
        close(getattr(norms[0], name), buffer.double())
        assert all(torch.equal(getattr(norm, name), getattr(norms[0], name)) for norm in norms), name


@pytest.mark.parametrize("mean", [1e4, -1e5])
def test_a_large_mean_costs_no_digits(monkeypatch: pytest.MonkeyPatch, mean: float) -> None:
    """In float32 the mean of the squares minus the square of the mean would be 0 or worse."""
    maps = [(torch.randn(4, CHANNELS, 8, 8, dtype=torch.float64) + mean).float() for _ in range(2)]

    def follow(rank: int) -> Tensor:
        norm = ReducedBatchNorm2d(nn.BatchNorm2d(CHANNELS, momentum=1.0), 2)
        norm(maps[rank])
        assert norm.running_var is not None
        return norm.running_var

    expected = torch.cat(maps).double().var((0, 2, 3))
    for running_var in on_ranks(monkeypatch, follow, 2):
        torch.testing.assert_close(running_var.double(), expected, rtol=2e-3, atol=0)


def test_one_value_over_all_ranks_is_refused_and_two_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, CHANNELS, 1, 1)
    with pytest.raises(ValueError, match=r"more than one value for each channel"):
        ReducedBatchNorm2d(nn.BatchNorm2d(CHANNELS), 1)(x)
    outputs = on_ranks(monkeypatch, lambda rank: ReducedBatchNorm2d(nn.BatchNorm2d(CHANNELS), 2)(x + rank), 2)
    torch.testing.assert_close(outputs[0], -outputs[1])


@pytest.mark.parametrize(
    ("device", "world_size", "kind"),
    [
        ("cpu", 1, ReducedBatchNorm2d), ("cpu", 2, ReducedBatchNorm2d), ("cuda", 1, nn.BatchNorm2d),
        ("cuda", 2, nn.SyncBatchNorm),
    ],
)  # fmt: skip
def test_a_converted_network_keeps_names_tensors_and_frozen_layers(device: str, world_size: int, kind: type) -> None:
    model = Darknet(zoo_cfg("yolov3-tiny"), num_classes=2, width=0.125)
    model.freeze(3)
    before = dict(model.state_dict(keep_vars=True))
    world = World(0, 0, world_size, world_size, 1, torch.device(device), "none")
    assert convert_sync_batchnorm(model, world) is model
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert norms and all(type(norm) is kind for norm in norms)
    assert [norm.training for norm in norms] == [False] * 2 + [True] * (len(norms) - 2), "frozen are layers 0 and 2"
