"""Steps whose gradients break while the loss is fine, with loss scale and clipping or without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.train_utils.small_training import (
    CONFIG,
    Parts,
    batches,
    mean_loss,
    network_with_norm,
    new_state,
    train_epoch,
)
from train_utils.config import Optimizer
from train_utils.distributed import World, init_distributed_mode
from train_utils.errors import TrainError
from train_utils.numerics import DTYPES, weights_dtype
from train_utils.optim import Schedule
from train_utils.train_state import TrainState

BATCH = batches(8, 8)


@pytest.fixture(scope="module")
def world() -> World:
    return init_distributed_mode("cpu", 60)


class Spoil(torch.autograd.Function):
    """Leaves values as they are; multiplies gradients above ``limit`` by ``factor``."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, factor: float, limit: float) -> Tensor:
        ctx.factor, ctx.limit = factor, limit
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * (ctx.factor if float(gradient.abs().max()) > ctx.limit else 1), None, None


def spoilt(factor: float, limit: float = 0.0) -> Any:
    def loss(raw_maps: Tensor, targets: Tensor, **_: Any) -> Parts:
        return mean_loss(Spoil.apply(raw_maps, factor, limit), targets)

    return loss


def snapshot(state: TrainState) -> list[Tensor]:
    momentum = [tensor for values in state.optimizer.state.values() for tensor in values.values()]
    kept = [*state.model.state_dict().values(), *state.average.module.state_dict().values(), *momentum]
    return [tensor.clone() for tensor in kept] + [torch.tensor(state.average.updates), state.loss_sums.clone()]


def same(one: list[Tensor], other: list[Tensor]) -> list[bool]:
    return [torch.equal(*pair) for pair in zip(one, other, strict=True)]


def start(
    clip_norm: float | None,
    loss_scale: float | None,
    model: nn.Module | None = None,
    optimizer: Optimizer = Optimizer.sgd,
) -> tuple[TrainState, Schedule]:
    schedule = Schedule(replace(CONFIG, name=optimizer, clip_norm=clip_norm), steps_per_epoch=1, total_steps=40)
    return new_state(model or network_with_norm(), schedule, loss_scale), schedule


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("precision", "loss_scale", "optimizer"),
    [
        ("float32", None, "sgd"), ("float64", None, "sgd"), ("bfloat16", None, "sgd"), ("float16", 8.0, "sgd"),
        ("float16", 1.0, "sgd"), ("float32", None, "adamw"), ("float64", None, "adamw"), ("float16", 8.0, "adamw"),
    ],
)  # fmt: skip
def test_a_step_is_made_or_changes_no_bit(
    world: World, precision: str, loss_scale: float | None, optimizer: str, frozen: bool, accumulate: int,
    clip_norm: float | None,
) -> None:  # fmt: skip
    """The last factor leaves each gradient finite, but not their norm. Training continues."""
    model = network_with_norm().to(weights_dtype(precision))
    model[0].requires_grad_(not frozen)
    state, schedule = start(clip_norm, loss_scale, model, Optimizer(optimizer))

    def train(loss: Any = mean_loss) -> None:
        loader, dtype = batches(8 // accumulate, 8), DTYPES.get(precision)
        train_epoch(world, state, schedule, loader, accumulate, loss, limit=1, autocast_dtype=dtype)

    train()
    still = [name.startswith("0.") and frozen for name in model.state_dict()] * 2  # and in the average
    for factor in (float("inf"), float("nan"), 1e200 if precision == "float64" else 1e30):
        before = snapshot(state)
        train()
        learnt = snapshot(state)
        assert same(before, learnt) == still + [False] * (len(learnt) - len(still))
        assert all(tensor.isfinite().all() for tensor in learnt)
        train(spoilt(factor))
        assert all(same(learnt, snapshot(state)))
    assert state.step == 7 and state.average.updates == 4


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
def test_gradients_that_stay_broken_under_a_loss_scale_end_the_training(
    world: World, clip_norm: float | None, factor: float
) -> None:
    """While the scale falls from 8 to 1 it may be the cause; later steps count."""
    state, schedule = start(clip_norm, loss_scale=8.0)
    before, said = snapshot(state), list[str]()
    with pytest.raises(TrainError, match=r"no longer finite at step 4 .* 2 step\(s\) in a row\. fix: .*float32"):
        train_epoch(world, state, schedule, BATCH * 9, loss=spoilt(factor), limit=1, log_line=said.append)
    assert state.step == 4 and all(same(before, snapshot(state)))
    assert ["loss scale of 8" in line for line in said] == [True, False, False], "told once, then the steps that count"


def test_a_norm_that_overflows_under_a_loss_scale_is_not_excused_by_it(world: World) -> None:
    """Each gradient is finite, so the scale stays, and nothing would ever change."""
    state, schedule = start(None, loss_scale=8.0)
    with pytest.raises(TrainError, match="no longer finite at step 0"):
        train_epoch(world, state, schedule, BATCH, loss=spoilt(1e30))


def test_the_first_overflows_of_a_loss_scale_are_no_trouble(world: World) -> None:
    """float16 starts at 65536 and halves the scale until no gradient overflows."""
    said: list[str] = []
    state, schedule = start(0.5, loss_scale=2.0**16)
    train_epoch(world, state, schedule, BATCH * 20, loss=spoilt(float("inf"), limit=0.1), limit=0, log_line=said.append)
    skipped = 20 - state.average.updates
    assert 3 < skipped < 16 and state.scaler.get_scale() == 2.0 ** (16 - skipped)
    assert len(said) == 1 and "update skipped" in said[0]
