"""The check for ranks that train different models: what it detects and what it says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from conf.entry import compose
from conf.failures import ConfigError
from conf.schema import TrainConfig
from tests.runs.process_group import run_group
from train_utils.distributed import init_distributed_mode
from train_utils.errors import TrainError
from train_utils.loop.same_weights import check_in_sync, fingerprint
from train_utils.parallel.wrap import convert_sync_batchnorm


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_a_fingerprint_shows_any_change_of_one_number_and_the_order_of_rows(dtype: torch.dtype) -> None:
    tensor = (torch.randn(5, 3, 3, 3) * 100).to(dtype)
    expected = fingerprint(tensor)
    for element in range(tensor.numel()):
        changed = tensor.clone()
        bits = changed.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]).view(-1)
        bits[element] ^= 1  # the last bit
        assert fingerprint(changed) != expected, element
    assert fingerprint(tensor.flip(0)) != expected
    assert fingerprint(tensor.contiguous(memory_format=torch.channels_last)) == expected


@pytest.mark.parametrize("tensor", [torch.tensor(3), torch.tensor([0.5]), torch.zeros(0), torch.zeros(2, 0, 3)])
def test_a_fingerprint_of_little(tensor: Tensor) -> None:
    assert fingerprint(tensor).shape == () and fingerprint(tensor) == fingerprint(tensor.clone())


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))


def guarded() -> list[str | None]:
    """What the check says on this rank about each plan in turn."""
    world = init_distributed_mode("cpu", 60)
    said: list[str | None] = []

    def ask(model: nn.Module, step: int = 6, lr: float = 0.1, every: int = 3) -> None:
        try:
            check_in_sync(model, world, step, lr, every)
            said.append(None)
        except TrainError as error:
            said.append(str(error))

    ask(network())
    model = network()
    with torch.no_grad():
        if world.rank == 1:
            model[2].weight[1, 2, 0, 0] += 1e-7
        if world.rank in (1, 2):
            model[3].bias[0] = 1
    ask(model)
    ask(model, step=5)  # not due
    ask(model, every=0)
    ask(network(), step=6 + 3 * (world.rank == 2))
    ask(network(), lr=0.1 + 1e-18 * world.rank + 1e-9 * (world.rank == 2))

    model = network()
    assert model[1].running_mean is not None
    model[1].running_mean += world.rank
    ask(model)  # each its own statistics, as without train.sync_bn
    model[1].eval()
    ask(model)  # frozen ones stand still, so they must be equal
    model[1].train()
    ask(convert_sync_batchnorm(model, world))
    return said


@pytest.mark.slow
def test_ranks_that_differ_are_named_with_the_first_tensor_by_all_ranks() -> None:
    reports = run_group(guarded, 3)
    assert reports[0] == reports[1] == reports[2]
    plain, weight, not_due, never, step, lr, own, frozen, synchronised = reports[0]
    assert plain is not_due is never is own is None
    assert weight.startswith("after step 6 the ranks no longer train the same model: 2.weight differs on rank 1 from")
    assert "fix:" in weight and "\n" not in weight
    assert "the step count differs on rank 2" in step and "the learning rate differs on rank 2" in lr
    assert "1.running_mean differs on ranks 1, 2" in frozen and "1.running_mean differs on ranks 1, 2" in synchronised


def test_the_option_is_a_number_of_steps() -> None:
    assert compose("train", TrainConfig, ["train.check_sync_every=0"]).train.check_sync_every == 0
    with pytest.raises(ConfigError, match=r"train\.check_sync_every must be 0 or more, got -1"):
        compose("train", TrainConfig, ["train.check_sync_every=-1"])
