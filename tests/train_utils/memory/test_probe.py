"""The largest batch that fits: search, counts on a CPU, trials on a GPU, and no side effects."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from train_utils.memory import probe as batch_probe
from train_utils.memory.probe import (
    Choice,
    CpuProbe,
    GpuProbe,
    TrainingPass,
    choose_images,
    divisors,
    largest_that_fits,
    saved_bytes,
)
from train_utils.processes.world import World

HERE = World(0, 0, 1, 1, 0, 1, torch.device("cpu"), "none", "none")


def test_divisors() -> None:
    assert divisors(1) == [1] and divisors(12) == [1, 2, 3, 4, 6, 12] and divisors(7) == [1, 7]


@pytest.mark.parametrize("number", [1, 7, 12, 64, 96])
def test_the_search_finds_the_largest_with_few_trials(number: int) -> None:
    candidates = divisors(number)
    for room in range(number + 2):
        tried: list[int] = []

        def fits(images: int, room: int = room, tried: list[int] = tried) -> bool:
            tried.append(images)
            return images <= room

        assert largest_that_fits(candidates, fits) == max((c for c in candidates if c <= room), default=0)
        assert len(tried) <= math.ceil(math.log2(len(candidates) + 1)) and len(set(tried)) == len(tried)


@dataclass
class Straight:
    """Takes ten bytes per image, and five."""

    available: int
    tried: list[int] = field(default_factory=list)

    def needed(self, images: int) -> int:
        self.tried.append(images)
        return 10 * images + 5


def with_others(*calls: Sequence[int]) -> Callable[[list[int]], list[int]]:
    """The maximum of this rank's values and another rank's, call by call."""
    theirs = iter(calls)
    return lambda values: [max(pair) for pair in zip(values, next(theirs), strict=True)]


def test_all_ranks_take_the_smallest_answer_and_hear_of_the_scarcest_memory() -> None:
    alone = choose_images([1, 2, 4, 8], Straight(60), list)
    assert alone == Choice(4, 45, 60)
    here = Straight(60)
    assert choose_images([1, 2, 4, 8], here, with_others([-2], [33, -40])) == Choice(2, 33, 40)
    assert here.tried[-1] == 2, "its own need for the number that all take"
    assert choose_images([1, 2, 4, 8], Straight(60), with_others([-8], [85, -90])) == Choice(4, 85, 60)


def test_one_rank_without_room_for_an_image_says_no_for_all() -> None:
    assert choose_images([1, 2], Straight(60), with_others([0], [99, -3])) == Choice(0, 99, 3)
    assert choose_images([1, 2], Straight(3), list) == Choice(0, 15, 3)


def test_storages_that_autograd_keeps_are_counted_once() -> None:
    weight = nn.Parameter(torch.ones(10))

    def forward(images: int) -> Tensor:
        x = torch.ones(images, 10, requires_grad=True)
        product = x * weight  # keeps x and the weight
        half = product[:, :5].sin()  # keeps a view of the product
        return (product.cos().sum() + half.sum()) * 2  # keeps the product again

    assert sorted(saved_bytes(forward, 3, [weight])) == [3 * 10 * 4] * 2
    assert sorted(saved_bytes(forward, 3, [])) == [10 * 4] + [3 * 10 * 4] * 2


def network() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.LeakyReLU(0.1, inplace=True)]
    return nn.Sequential(*layers, nn.Dropout(0.5), nn.Conv2d(16, 8, 3, stride=2))


def mean_loss(raw_maps: Tensor, targets: Tensor, **_: Any) -> SimpleNamespace:
    assert targets[-1, 0] == len(raw_maps) - 1 and targets.dtype == torch.float32
    return SimpleNamespace(total=raw_maps.square().mean())


def training_pass(model: nn.Module, sync_bn: bool = True, dtype: torch.dtype = torch.float32) -> TrainingPass:
    return TrainingPass(model, mean_loss, [64, 32, 64], HERE, dtype, None, torch.channels_last, sync_bn)


@pytest.mark.parametrize("sync_bn", [True, False])
def test_a_pass_leaves_no_trace(sync_bn: bool) -> None:
    model = network().eval()
    model[0].weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    types = [type(module) for module in model.children()]
    generator = torch.get_rng_state()
    run = training_pass(model, sync_bn, torch.float64)
    seen: list[tuple[int, ...]] = []
    run.model.register_forward_pre_hook(lambda _, images: seen.append(tuple(images[0].shape)))
    run(3)
    assert seen == [(3, 3, 64, 64), (3, 3, 32, 32), (3, 3, 64, 64)]
    CpuProbe(run, 2, 2**40)
    assert torch.equal(torch.get_rng_state(), generator)
    assert not model.training and [type(module) for module in model.children()] == types
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for part in (model, run.model) for parameter in part.parameters())
    assert not torch.equal(run.model[1].running_var.float(), before["1.running_var"]), "the copy was in train mode"


def test_what_a_cpu_needs_grows_in_a_straight_line_that_counting_confirms() -> None:
    run = training_pass(network())
    probe = CpuProbe(run, 1, 2**40)
    maps = 64 * 64 * 16 * 4  # bytes of an image's largest map
    for images in (1, 2, 7):
        counted = saved_bytes(run.forward, images, run.model.parameters())
        assert max(counted) == images * maps
        expected = 3 * run.weights_bytes + batch_probe.OVERHEAD + batch_probe.peak_of(counted)
        assert probe.needed(images) == pytest.approx(expected, rel=1e-3)
        assert probe.needed(images) - 2**26 > (2 + 5) * images * maps, "input of batch norm, its output, and gradients"
    more_ranks = CpuProbe(run, 2, 2**40)
    assert more_ranks.needed(4) == probe.needed(4) + run.weights_bytes
    assert CpuProbe(run, 1, 2**40, moments=2).needed(4) == probe.needed(4) + run.weights_bytes


def test_where_one_image_is_too_many_two_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    run = training_pass(network())
    tried: list[int] = []
    forward = run.forward
    monkeypatch.setattr(run, "forward", lambda images: [tried.append(images), forward(images)][1])
    assert CpuProbe(run, 1, 2**20).needed(1) > 2**20
    assert tried == [1]


class FakeGpu:
    """Stands in for a GPU of 1000 bytes; a pass takes 100 bytes per image."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device, self.weights_bytes = torch.device("cuda", 0), 60
        self.taken = self.peak = 0
        self.passes: list[int] = []
        properties = SimpleNamespace(total_memory=1000)
        for name, function in {
            "get_device_properties": lambda _: properties,
            "empty_cache": self.empty,
            "reset_peak_memory_stats": lambda _: None,
            "synchronize": lambda _: None,
            "max_memory_reserved": lambda _: self.peak,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(torch, "empty", lambda size, **_: self.take(size))

    def empty(self) -> None:
        self.taken = self.peak = 0

    def take(self, size: int) -> object:
        self.taken += size
        self.peak = max(self.peak, self.taken)
        if self.taken > 1000:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
        return object()

    def __call__(self, images: int) -> None:
        self.passes.append(images)
        self.take(100 * images)


@pytest.mark.parametrize(
    ("world_size", "moments", "room", "expected"), [(1, 1, 170, 8), (2, 1, 230, 6), (1, 2, 230, 6), (1, 1, 170, 4)]
)
def test_a_gpu_is_tried_with_room_for_the_optimiser_the_average_and_the_buckets(
    monkeypatch: pytest.MonkeyPatch, world_size: int, moments: int, room: int, expected: int
) -> None:
    """Room: 2 or 3 copies of the 60 bytes of weights, and 5 % of 1000."""
    gpu = FakeGpu(monkeypatch)
    probe = GpuProbe(gpu, world_size, moments)
    candidates = [1, 2, 4, 6, 8] if expected != 4 else [1, 2, 4, 12]
    choice = choose_images(candidates, probe, list)
    monkeypatch.undo()
    assert choice == Choice(expected, 100 * expected + room, 1000)
    assert len(set(gpu.passes)) == len(gpu.passes) <= 3, "no number is tried twice"


def test_a_gpu_without_room_for_one_image(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    gpu.weights_bytes = 450
    choice = choose_images([1, 2], GpuProbe(gpu, 1), list)
    monkeypatch.undo()
    assert choice.images == 0 and choice.needed > choice.available


def test_another_error_of_a_trial_is_not_taken_for_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    monkeypatch.setattr(FakeGpu, "__call__", lambda *_: torch._assert(False, "a bug"))
    with pytest.raises(AssertionError, match="a bug"):
        choose_images([1, 2], GpuProbe(gpu, 1), list)


@pytest.mark.gpu
def test_on_a_real_gpu_the_choice_runs_and_the_next_does_not() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda", 0)
    world = World(0, 0, 1, 1, 0, 1, device, "none", "none")
    sides, formats = [1024, 512, 1024], (torch.float32, torch.bfloat16, torch.channels_last)
    run = TrainingPass(network(), mean_loss, sides, world, *formats, False)
    probe = GpuProbe(run, 1)
    generator = torch.cuda.get_rng_state(device)
    candidates = [2**exponent for exponent in range(16)]
    choice = choose_images(candidates, probe, list)
    assert 1 <= choice.images < candidates[-1] and choice.needed <= choice.available
    assert probe.needed(2 * choice.images) > choice.available
    assert torch.equal(torch.cuda.get_rng_state(device), generator)
    assert torch.cuda.memory_allocated(device) <= 2 * run.weights_bytes + 2**20, "nothing of the trials is left"
    run(choice.images)
