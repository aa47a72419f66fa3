"""The loop on a small network: accumulation, and losses or gradients that break."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conf import TrainError
from conf.schema import Optimizer
from data import Batch
from data.progress import Progress
from models.loss import LossParts
from tests.runs.process_group import run_group
from tests.train_utils.small_training import (
    CONFIG,
    WORLD,
    batches,
    mean_loss,
    network,
    network_with_norm,
    new_state,
    tensors,
    train_epoch,
)
from train_utils.checkpoint import CheckpointWriter
from train_utils.distributed import World, init_distributed_mode
from train_utils.engine import explain_out_of_memory
from train_utils.inference.detect import collect_detections, detect_batches
from train_utils.numerics import DTYPES
from train_utils.optim import Schedule, make_optimizer
from train_utils.train_state import TrainState


def trained(
    size: int,
    accumulate: int,
    loss: Any = mean_loss,
    clip: float | None = None,
    model: nn.Module | None = None,
    loss_scale: float | None = None,
    world: World = WORLD,
    **guard: Any,
) -> TrainState:
    config = replace(CONFIG, clip_norm=clip, lr=0.1)
    schedule = Schedule(config, steps_per_epoch=3, total_steps=6)
    state = new_state(model or network(), schedule, loss_scale)
    result = train_epoch(state, batches(size, 24), accumulate, loss, world=world, **guard)
    assert state.step == 24 // size // accumulate and state.seen == 24 * world.world_size
    assert 0 <= result.waiting < 1
    return state


@pytest.mark.parametrize("clip", [None, 0.01])
def test_accumulation_makes_the_update_of_the_whole_batch(clip: float | None) -> None:
    whole, parts = trained(8, 1, clip=clip), trained(2, 4, clip=clip)
    torch.testing.assert_close(whole.loss_sums, parts.loss_sums, rtol=1e-5, atol=0)
    for one, other, before in zip(whole.parameters, parts.parameters, network().parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
        assert not torch.equal(one, before), "nothing was learnt"


def test_each_step_has_the_rates_of_its_own_number_also_in_the_next_epoch() -> None:
    schedule = Schedule(replace(CONFIG, warmup_epochs=1), steps_per_epoch=3, total_steps=30)
    state, seen = new_state(network_with_norm(), schedule), list[list[float]]()
    keys = "lr", "momentum", "weight_decay"
    state.optimizer.register_step_pre_hook(
        lambda *_: seen.append([group[key] for group in state.optimizer.param_groups for key in keys])
    )
    loss = Mock(count_positives=mean_loss.count_positives, sums=Mock(side_effect=mean_loss.sums))
    for _ in range(2):
        train_epoch(state, batches(4, 24), accumulate=2, loss=loss)
    ratios = [call.args[3] for call in loss.sums.call_args_list]
    assert ratios == [schedule.warmup(step) for step in range(6) for _ in range(2)] and ratios[0] < ratios[-1]
    twin = make_optimizer(network_with_norm(), schedule.config)
    for step in range(6):
        schedule.apply(twin, step)
        assert seen.pop(0) == [group[key] for group in twin.param_groups for key in keys]
    assert not seen and schedule.lr_factor(5) < schedule.lr_factor(4) < 1


class Explosive(nn.Sequential):
    """A network that gives NaN for images 8 to 15, those of one step."""

    def forward(self, images: Tensor) -> Tensor:
        poisoned = torch.equal(images, batches(8, 24)[1].images.float().div(255))
        return super().forward(images * float("inf") if poisoned else images)


def test_a_bad_step_leaves_no_trace() -> None:
    said: list[str] = []
    model = Explosive(*network_with_norm().children())
    state = trained(8, 1, model=model, limit=1, log_line=said.append)
    assert all(value.isfinite().all() for value in model.state_dict().values())
    assert all(value.isfinite().all() for value in state.average.module.state_dict().values())
    assert state.average.updates == 2 and int(model[1].num_batches_tracked) == 2
    (line,) = said
    assert "step 2" in line and "update skipped" in line
    train_epoch(state, batches(8, 24) * 2, limit=1, log_line=said.append)
    assert state.average.updates == 6 and len(said) == 3, "bad steps, but not in a row"
    with pytest.raises(TrainError, match=r"no longer finite at step 2 .* 1 step in a row.*optim\.lr"):
        trained(8, 1, model=Explosive(*network_with_norm().children()), limit=0, log_line=said.append)


def test_an_epoch_of_bad_steps_has_no_loss_of_zero() -> None:
    state = new_state(Explosive(*network_with_norm().children()), Schedule(CONFIG, steps_per_epoch=1, total_steps=6))
    result = train_epoch(state, batches(8, 24)[1:2], limit=1, log_line=lambda _: None)
    assert state.average.updates == 0 and np.isnan(list(result.losses.values())).all()


def train_with_a_bad_batch_on_rank_one() -> tuple[int, list[str]]:
    """This rank's number of updates and its log lines, the same with the loss scale of float16."""
    world = init_distributed_mode("cpu", 60)
    found = []
    for loss_scale in (None, 8.0):
        said: list[str] = []
        model = Explosive(*network_with_norm().children()) if world.rank == 1 else network()
        state = trained(8, 1, model=model, loss_scale=loss_scale, world=world, limit=1, log_line=said.append)
        found.append((state.average.updates, said))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.release
def test_all_ranks_skip_what_is_bad_on_one() -> None:
    (first, said), (second, also_said) = run_group(train_with_a_bad_batch_on_rank_one, 2)
    assert first == second == 2, "of three steps one is skipped, by both"
    assert len(said) == len(also_said) == 1 and "nan" not in said[0] and "nan" in also_said[0]


def test_a_batch_is_not_kept_while_the_next_is_waited_for() -> None:
    state = start(None, None)
    before: list[weakref.ref[Tensor]] = []

    def loader() -> Iterator[Batch]:
        for _ in range(3):
            assert all(images() is None for images in before)
            fresh = batches(8, 8)
            before.append(weakref.ref(fresh[0].images))
            yield fresh.pop()

    train_epoch(state, loader())
    assert state.step == 3


def test_detections_do_not_depend_on_the_number_of_threads() -> None:
    """Threads that share a convolution add in another order; here one thread computes each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.Conv2d(64, 5, 3, padding=1))

    def postprocess(raw_maps: Tensor) -> list[Tensor]:
        return [torch.cat((image.flatten(1).T[:9], torch.zeros(9, 1)), dim=1) for image in raw_maps]

    def found(threads: int) -> np.ndarray:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            progress = Progress(24, "evaluate", enabled=False)
            of_batches = detect_batches(model.eval(), batches(4, 24), postprocess, WORLD.device)
            result = collect_detections(of_batches, lambda _, __, boxes: boxes, progress)
            assert torch.get_num_threads() == threads, "the setting was not put back"
            return result
        finally:
            torch.set_num_threads(before)

    one, two = found(1), found(2)
    assert len(one) == 24 * 9 and one["image_id"].tolist() == np.repeat(np.arange(24), 9).tolist()
    assert one.tobytes() == two.tobytes()


BATCH = batches(8, 8)


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
    def sums(raw_maps: Tensor, *others: Any) -> tuple[LossParts, Tensor]:
        return mean_loss.sums(Spoil.apply(raw_maps, factor, limit), *others)

    return SimpleNamespace(count_positives=mean_loss.count_positives, sums=sums)


def snapshot(state: TrainState) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors(state)] + [
        torch.tensor(state.average.updates),
        state.loss_sums.clone(),
    ]


def same(one: list[Tensor], other: list[Tensor]) -> list[bool]:
    return [torch.equal(*pair) for pair in zip(one, other, strict=True)]


def start(
    clip_norm: float | None,
    loss_scale: float | None,
    model: nn.Module | None = None,
    optimizer: Optimizer = Optimizer.sgd,
) -> TrainState:
    schedule = Schedule(replace(CONFIG, name=optimizer, clip_norm=clip_norm), steps_per_epoch=1, total_steps=40)
    return new_state(model or network_with_norm(), schedule, loss_scale)


@pytest.mark.parametrize(("clip_norm", "accumulate", "frozen"), [(None, 1, False), (0.5, 1, True), (0.5, 2, False)])
@pytest.mark.parametrize(
    ("precision", "loss_scale", "optimizer"),
    [
        ("float32", None, "sgd"), ("float64", None, "sgd"), ("bfloat16", None, "sgd"), ("float16", 8.0, "sgd"),
        ("float16", 1.0, "sgd"), ("float32", None, "adamw"), ("float64", None, "adamw"), ("float16", 8.0, "adamw"),
    ],
)  # fmt: skip
def test_a_step_is_made_or_changes_no_bit(precision, loss_scale, optimizer, frozen, accumulate, clip_norm) -> None:
    model = network_with_norm().to(torch.float64 if precision == "float64" else torch.float32)
    model[0].requires_grad_(not frozen)
    state = start(clip_norm, loss_scale, model, Optimizer(optimizer))

    def train(loss: Any = mean_loss) -> None:
        loader, dtype = batches(8 // accumulate, 8), DTYPES.get(precision)
        train_epoch(state, loader, accumulate, loss, limit=1, autocast_dtype=dtype)

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
def test_gradients_that_stay_broken_under_a_loss_scale_end_the_training(clip_norm: float | None, factor: float) -> None:
    state = start(clip_norm, loss_scale=8.0)
    before, said = snapshot(state), list[str]()
    with pytest.raises(TrainError, match=r"no longer finite at step 5 .* 2 steps in a row\. fix: .*float32"):
        train_epoch(state, BATCH * 9, loss=spoilt(factor), limit=1, log_line=said.append)
    assert state.step == 4 and all(same(before, snapshot(state)))
    assert ["at a loss scale of" in line for line in said] == [True] * 3 + [False] * 2, "then the steps that count"


@pytest.mark.parametrize(
    ("value", "place"), [("nan", "0.weight"), ("inf", "1.weight"), ("-inf", "1.running_var"), ("nan", "2.bias")]
)
@pytest.mark.parametrize(
    ("steps", "saves", "loss_scale", "optimizer"),
    [(1, False, None, "sgd"), (3, False, 8.0, "sgd"), (3, True, None, "adamw"), (3, True, 8.0, "sgd")],
)
def test_a_broken_weight_ends_the_training_before_it_is_saved_or_evaluated(
    steps: int, saves: bool, loss_scale: float | None, optimizer: str, place: str, value: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    saved, asked = list[object](), list[int]()
    monkeypatch.setattr(CheckpointWriter, "is_due", lambda _, step: asked.append(step) or saves)
    monkeypatch.setattr(CheckpointWriter, "save", lambda _, state: saved.append(state))
    state = start(None, loss_scale, optimizer=Optimizer(optimizer))
    tensor = state.model.state_dict()[place]
    state.optimizer.register_step_post_hook(lambda *_: tensor[0].fill_(float(value)))
    with pytest.raises(TrainError, match=r"not finite after \d step.* fix: a lower optim\.lr"):
        train_epoch(state, BATCH * steps, limit=99)
    assert state.step == (steps if place == "1.running_var" and not saves else 1) and not saved
    assert asked == list(range(1, len(asked) + 1)), "each step by its number"


def test_a_norm_that_overflows_under_a_loss_scale_is_not_excused_by_it() -> None:
    """Each gradient is finite, so the scale stays, and nothing would ever change."""
    state = start(None, loss_scale=8.0)
    with pytest.raises(TrainError, match="no longer finite at step 1"):
        train_epoch(state, BATCH, loss=spoilt(1e30))


def test_the_first_overflows_of_a_loss_scale_are_no_trouble() -> None:
    """float16 starts at 65536 and halves the scale until no gradient overflows."""
    said: list[str] = []
    state = start(0.5, loss_scale=2.0**16)
    train_epoch(state, BATCH * 20, loss=spoilt(float("inf"), limit=0.1), limit=0, log_line=said.append)
    skipped = 20 - state.average.updates
    assert 3 < skipped < 16 and state.scaler.get_scale() == 2.0 ** (16 - skipped)
    assert len(said) == skipped and all("the scale falls" in line for line in said)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("GET was unable to find an engine to execute this computation"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory"),
    ],
)
def test_full_memory_in_any_words_names_a_smaller_pass(error: RuntimeError) -> None:
    sampler = SimpleNamespace(images_per_rank=6, accumulate=2)
    with (
        pytest.raises(TrainError, match=r"fix: train\.micro_batch_size=8,"),
        explain_out_of_memory(sampler, replace(WORLD, world_size=2)),
    ):
        raise error
    with (
        pytest.raises(RuntimeError, match="size mismatch"),
        explain_out_of_memory(sampler, replace(WORLD, world_size=2)),
    ):
        raise RuntimeError("size mismatch")
