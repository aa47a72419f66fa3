"""Batch norm over several ranks (threads) against torch's over all maps at once."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import Darknet, zoo_cfg
from train_utils.parallel import sync_batchnorm
from train_utils.parallel.by_image import Images
from train_utils.parallel.sync_batchnorm import GlobalBatchNorm2d
from train_utils.parallel.wrap import convert_sync_batchnorm
from train_utils.processes.world import World

CHANNELS = 7
SHAPES = [(2, CHANNELS, 6, 4), (2, CHANNELS, 5, 5), (2, CHANNELS, 1, 2)]  # of the three ranks
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}
CPU = torch.device("cpu")


def on_ranks(function: Callable[[int, Callable[[Tensor], Tensor]], Any], count: int) -> list[Any]:
    """Run ``function(rank, stack_over_ranks)`` on threads that play ranks."""
    barrier, given = threading.Barrier(count, timeout=30), [torch.empty(0)] * count

    def run(rank: int) -> Any:
        def stack(tensor: Tensor) -> Tensor:
            given[rank] = tensor.clone()
            barrier.wait()
            stacked = torch.stack(given)
            barrier.wait()
            return stacked

        return function(rank, stack)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def plain_norm(dtype: torch.dtype) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(CHANNELS, eps=1e-4, momentum=0.3).to(dtype)
    nn.init.uniform_(norm.weight, 0.5, 2)
    nn.init.normal_(norm.bias)
    return norm


def rows(maps: list[Tensor]) -> Tensor:
    """All positions of all maps as one batch of 1x1 maps."""
    return torch.cat([x.detach().double().permute(0, 2, 3, 1).reshape(-1, CHANNELS) for x in maps])[:, :, None, None]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_it_is_torch_s_batch_norm_over_the_maps_of_all_ranks(dtype: torch.dtype, layout: torch.memory_format) -> None:
    parameters_dtype = torch.float32 if dtype == torch.bfloat16 else dtype
    start = plain_norm(parameters_dtype)
    maps, grads = (
        [(torch.randn(shape) * 2 + mean).to(dtype).contiguous(memory_format=layout) for shape in SHAPES]
        for mean in (3, 0)
    )

    def train_one(rank: int, stack: Callable[[Tensor], Tensor]) -> tuple[GlobalBatchNorm2d, Tensor, Tensor]:
        norm, x = GlobalBatchNorm2d(copy.deepcopy(start), stack), maps[rank].clone().requires_grad_()
        for _ in range(2):  # running statistics update twice
            y = norm(x)
        y.backward(grads[rank])
        assert x.grad is not None
        return norm, y, x.grad

    found = on_ranks(train_one, len(SHAPES))
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


def test_a_large_mean_costs_no_digits() -> None:
    """Computed as a difference of squares, the variance 1 would vanish in float32."""
    maps = [torch.randn(4, CHANNELS, 8, 8, dtype=torch.float64) + 1e4 + rank for rank in range(2)]

    def follow(rank: int, stack: Callable[[Tensor], Tensor]) -> Tensor:
        norm = GlobalBatchNorm2d(nn.BatchNorm2d(CHANNELS, momentum=1.0), stack)
        norm(maps[rank].float())
        assert norm.running_var is not None
        return norm.running_var

    expected = torch.cat([x.float() for x in maps]).double().var((0, 2, 3))
    for running_var in on_ranks(follow, 2):
        torch.testing.assert_close(running_var.double(), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("in_cache", [sync_batchnorm.IN_CACHE, 3 * CHANNELS * 48 * 48])
def test_statistics_are_exact_to_rounding_in_either_memory_format(
    in_cache: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's channels_last kernel sums a channel in one float32: off by 1e-5 here."""
    monkeypatch.setattr(sync_batchnorm, "IN_CACHE", in_cache)
    x = torch.randn(8, CHANNELS, 48, 48) * 2 + 5
    weight = torch.randn(8, CHANNELS, 48, 48)
    for layout in (torch.contiguous_format, torch.channels_last):
        found = {}
        for dtype in (torch.float32, torch.float64):
            norm = GlobalBatchNorm2d(nn.BatchNorm2d(CHANNELS, momentum=1.0).to(dtype), lambda tensor: tensor[None])
            maps = x.to(dtype).clone(memory_format=layout).requires_grad_()
            (norm(maps) * weight.to(dtype)).sum().backward()
            found[dtype] = [norm.running_mean, norm.running_var, norm.weight.grad, norm.bias.grad, maps.grad]
        for one, other in zip(found[torch.float32], found[torch.float64], strict=True):
            assert one is not None and other is not None
            torch.testing.assert_close(one.double(), other, rtol=2e-6, atol=2e-4)


def test_one_value_over_all_ranks_is_refused_and_two_are_enough() -> None:
    x = torch.randn(1, CHANNELS, 1, 1)
    with pytest.raises(ValueError, match=r"more than one value for each channel over all ranks"):
        GlobalBatchNorm2d(nn.BatchNorm2d(CHANNELS), lambda tensor: tensor[None])(x)
    outputs = on_ranks(lambda rank, stack: GlobalBatchNorm2d(nn.BatchNorm2d(CHANNELS), stack)(x + rank), 2)
    torch.testing.assert_close(outputs[0], -outputs[1])


def world(size: int) -> World:
    return World(0, 0, size, size, node_rank=0, num_nodes=1, device=CPU, launcher="none", backend="none")


def test_a_converted_network_keeps_names_tensors_and_frozen_layers() -> None:
    model = Darknet(zoo_cfg("yolov3-tiny"), num_classes=2, width=0.125)
    model.freeze(3)
    before = dict(model.state_dict(keep_vars=True))
    assert convert_sync_batchnorm(model, world(2), lambda tensor: tensor[None]) is model
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms and all(isinstance(norm, GlobalBatchNorm2d) for norm in norms)
    assert [norm.training for norm in norms] == [False] * 2 + [True] * (len(norms) - 2), "frozen are layers 0 and 2"

    x, plain = torch.rand(2, 3, 64, 64), Darknet(zoo_cfg("yolov3-tiny"), num_classes=2, width=0.125)
    plain.load_state_dict(model.state_dict())
    for one, other in zip(copy.deepcopy(model).eval()(x), plain.eval()(x), strict=True):
        assert torch.equal(one, other)


def test_a_batch_norm_that_keeps_no_statistics_is_refused() -> None:
    with pytest.raises(ValueError, match="running statistics"):
        GlobalBatchNorm2d(nn.BatchNorm2d(2, track_running_stats=False), lambda tensor: tensor[None])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_dealing_of_images_has_no_say(layout: torch.memory_format) -> None:
    """The bits are equal for any dealing and order, as a batch or one by one."""
    torch.manual_seed(2)
    x = (torch.randn(6, CHANNELS, 5, 3) * 3 + 2).to(memory_format=layout)
    grad, start = torch.randn_like(x), plain_norm(torch.float32)

    def train_on(shares: list[list[int]], one_by_one: bool) -> dict[str, Tensor]:
        def run(rank: int, stack: Callable[[Tensor], Tensor]) -> tuple[GlobalBatchNorm2d, Tensor, Tensor]:
            norm = GlobalBatchNorm2d(copy.deepcopy(start), stack)
            own = x[shares[rank]].clone(memory_format=torch.preserve_format).requires_grad_()
            y = torch.cat(norm(Images(own.split(1), [torch.get_rng_state()])).each) if one_by_one else norm(own)
            y.backward(grad[shares[rank]])
            assert own.grad is not None
            return norm, y.detach(), own.grad

        norms, maps, grads = zip(*on_ranks(run, len(shares)), strict=True)
        back = torch.tensor([image for share in shares for image in share]).argsort()
        found = {"y": torch.cat(maps)[back], "grad": torch.cat(grads)[back]}
        return found | dict(norms[0].named_buffers())

    expected = train_on([[0, 1, 2, 3, 4, 5]], one_by_one=True)
    for shares in ([[0, 2, 4], [1, 3, 5]], [[0, 1, 2], [3, 4, 5]], [[5, 0], [3, 1], [2, 4]]):
        found = train_on(shares, one_by_one=True)
        assert [key for key in expected if not torch.equal(found[key], expected[key])] == [], shares
    whole = train_on([[0, 1, 2, 3, 4, 5]], one_by_one=False)
    for key, value in expected.items():
        torch.testing.assert_close(whole[key], value, rtol=1e-6, atol=1e-6)
