"""What a resumed run restores and reports about its options; tests/test_train.py has whole runs."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train_utils.small_training import CONFIG, batches, network_with_norm, new_state, train_epoch
from train_utils.config import Decay, OptimConfig, Optimizer
from train_utils.distributed import World, init_distributed_mode
from train_utils.errors import CheckpointError, TrainError
from train_utils.numerics import autocast_dtype
from train_utils.optim import Schedule
from train_utils.run.plain_data import to_plain
from train_utils.run.run_state import RunState
from train_utils.run.same_training import changed_values, check_same_training


@pytest.fixture(scope="module")
def world() -> World:
    return init_distributed_mode("cpu", 60)


def test_changed_options_are_listed_by_full_key() -> None:
    before = {"train": {"epochs": 3, "seed": 0}, "optim": {"lr": 0.01}, "resume": None, "old": 1}
    now = {"train": {"epochs": 5, "seed": 0}, "optim": {"lr": 0.02}, "resume": "runs/x"}
    assert changed_values(before, now) == {"train.epochs": "3 -> 5", "optim.lr": "0.01 -> 0.02", "old": "1 -> None"}
    assert changed_values(before, before) == {}


def test_a_run_of_an_earlier_version_does_not_go_on_with_another_loss(tmp_path: Path) -> None:
    """Its checkpoint lacks the option, which another loss has not."""

    def described(**loss: object) -> dict[str, Any]:
        return {"network": {}, "names": [], "config": {"loss": loss}, "data": {}}

    today = {"name": "yolov3", "balance": "equal", "positives_by": "shape", "class_weights": None}
    before, same, other = described(name="yolov3"), described(**today), described(**(today | {"balance": "pooled"}))
    for old in (before, described()):  # the oldest had no choice
        check_same_training(old, same, tmp_path, force=False)
    ranked = {"positives": 10, "positives_by": "overlap"}
    check_same_training(described(name="yolov3", positives=10), described(**(today | ranked)), tmp_path, force=False)
    with pytest.raises(CheckpointError, match=r"loss\.balance: equal -> pooled"):
        check_same_training(before, other, tmp_path, force=False)
    check_same_training(before, other, tmp_path, force=True)


def test_precision_names_its_dtype_and_refuses_what_a_cpu_cannot() -> None:
    cpu = torch.device("cpu")
    assert autocast_dtype("float32", cpu) is None
    assert autocast_dtype("bfloat16", cpu) is torch.bfloat16
    assert autocast_dtype("auto", cpu) in (None, torch.bfloat16)
    with pytest.raises(TrainError, match=r"train\.precision=float16 needs a GPU\. fix:"):
        autocast_dtype("float16", cpu)
    with pytest.raises(TrainError, match=r"train\.precision=tf32 needs a GPU with TF32 .*fix: train\.precision="):
        autocast_dtype("tf32", cpu)


# In burn-in, with active clipping and a ramping average, each option affects every step.
SENSITIVE = replace(CONFIG, burn_in_epochs=2, clip_norm=0.5, ema_window=4.0)
OTHERWISE: dict[str, Any] = {
    "lr": 0.03, "final_lr_ratio": 0.5, "decay": Decay.linear, "flat_fraction": 0.5, "momentum": 0.0,
    "weight_decay": 0.1,
    "burn_in_epochs": 3, "burn_in_min_steps": 11, "burn_in_bias_lr": 0.3,
    "clip_norm": None, "ema_decay": 0.5, "ema_window": 0.1,
}  # fmt: skip


def after_two_epochs(world: World, before: OptimConfig, after: OptimConfig, resumed: bool) -> list[torch.Tensor]:
    """Weights, statistics and average after an epoch of each, on one state or via a checkpoint."""
    schedules = [Schedule(config, steps_per_epoch=3, total_steps=120) for config in (before, after)]
    state = new_state(network_with_norm(), schedules[0])
    train_epoch(world, state, schedules[0], batches(8, 24))
    state.end_epoch()
    if resumed:
        saved = state.to_plain()
        assert saved is not None
        state = new_state(network_with_norm(), schedules[1])
        state.resume(to_plain(saved, copied=True), Path("run"), world, force=True)
    state.average.schedule = schedules[1]
    rates: list[dict[str, float]] = []
    state.optimizer.register_step_pre_hook(
        lambda optimizer, *_: rates.append({group["name"]: group["lr"] for group in optimizer.param_groups})
    )
    result = train_epoch(world, state, schedules[1], batches(8, 24))
    assert [rate["convolution"] for rate in rates] == [after.lr * schedules[1].weight_lr_factor(i) for i in (3, 4, 5)]
    assert [rate["bias"] for rate in rates] == [after.lr * schedules[1].bias_lr_factor(i) for i in (3, 4, 5)]
    assert result.lr == rates[-1]["convolution"], "the table shows another rate than the one used"
    return [*state.model.state_dict().values(), *state.average.module.state_dict().values()]


@pytest.mark.parametrize("key", list(OTHERWISE))
def test_every_changed_option_of_optim_takes_effect_after_a_forced_resume(world: World, key: str) -> None:
    """As if it had been changed within the running training; in both directions."""
    changed = replace(SENSITIVE, **{key: OTHERWISE[key]})
    for before, after in ((SENSITIVE, changed), (changed, SENSITIVE)):
        as_before, expected, found = (
            after_two_epochs(world, before, config, resumed)
            for config, resumed in ((before, True), (after, False), (after, True))
        )
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
        assert not all(torch.equal(*pair) for pair in zip(as_before, found, strict=True)), "no effect"


def test_every_option_of_optim_but_the_optimiser_is_changed() -> None:
    others = {"name", "kept_heads_factor"}  # the latter changes the rate before a schedule has it
    assert OTHERWISE.keys() == {field.name for field in fields(OptimConfig)} - others


SCHEDULE = Schedule(CONFIG, steps_per_epoch=3, total_steps=12)
ADAMW = replace(SCHEDULE, config=replace(CONFIG, name=Optimizer.adamw))


def trained_and_saved(world: World, schedule: Schedule = SCHEDULE) -> tuple[RunState, dict[str, Any]]:
    """A state after one epoch, and what a file of it gives back."""
    state = new_state(network_with_norm(), schedule)
    train_epoch(world, state, schedule, batches(8, 24))
    state.end_epoch()
    saved = state.to_plain()
    assert saved is not None
    copy: dict[str, Any] = to_plain(saved, copied=True)
    return state, copy


def tensors(state: RunState) -> list[torch.Tensor]:
    momentum = [tensor for values in state.optimizer.state.values() for tensor in values.values()]
    return [*state.model.state_dict().values(), *state.average.module.state_dict().values(), *momentum]


@pytest.mark.parametrize(("schedule", "kept"), [(SCHEDULE, 1), (ADAMW, 3)])
def test_what_is_taken_up_has_the_values_and_the_memory_layout_of_before(
    world: World, schedule: Schedule, kept: int
) -> None:
    """``kept``: momentum for each of 5 parameters; AdamW has two means and the number of steps."""
    state, saved = trained_and_saved(world, schedule)
    resumed = new_state(network_with_norm(), schedule)
    resumed.resume(saved, Path("run"), world, force=False)
    for _ in range(2):  # at once, and after both went on
        pairs = list(zip(tensors(state), tensors(resumed), strict=True))
        assert len(pairs) == 2 * 8 + 5 * kept and any(not one.is_contiguous() for one, _ in pairs)
        for one, other in pairs:
            assert torch.equal(one, other) and one.stride() == other.stride()
        for each in (state, resumed):
            train_epoch(world, each, schedule, batches(8, 24))


@pytest.mark.parametrize(("before", "after"), [(SCHEDULE, ADAMW), (ADAMW, SCHEDULE)])
def test_the_state_of_another_optimiser_is_refused_also_by_force(
    world: World, before: Schedule, after: Schedule
) -> None:
    _, saved = trained_and_saved(world, before)
    was, now = before.config.name, after.config.name
    with pytest.raises(CheckpointError, match=rf"optim={now} cannot continue .* optim={was} .* fix: optim={was}"):
        new_state(network_with_norm(), after).resume(saved, Path("run"), world, force=True)


def test_layers_may_be_frozen_and_thawed_by_a_forced_resume(world: World) -> None:
    _, saved = trained_and_saved(world)
    first = network_with_norm()
    first[0].requires_grad_(False)
    frozen = new_state(first, SCHEDULE)
    frozen.resume(saved, Path("run"), world, force=True)
    train_epoch(world, frozen, SCHEDULE, batches(8, 24))
    assert torch.equal(first[0].weight, saved["model"]["0.weight"])
    again = frozen.to_plain()
    assert again is not None
    thawed = new_state(network_with_norm(), SCHEDULE)
    thawed.resume(to_plain(again, copied=True), Path("run"), world, force=True)
    momentum = {name: thawed.optimizer.state.get(p, {}) for name, p in thawed.model.named_parameters()}
    assert [name for name, values in momentum.items() if "momentum_buffer" not in values] == ["0.weight"]
    found = frozen.optimizer.state[first[2].weight]["momentum_buffer"]
    assert torch.equal(momentum["2.weight"]["momentum_buffer"], found)
    for group in again["optimizer"]["param_groups"]:
        del group["names"]  # as earlier versions wrote it
    with pytest.raises(CheckpointError, match=r"which layers were frozen\. fix: model\.freeze as it was"):
        new_state(network_with_norm(), SCHEDULE).resume(again, Path("run"), world, force=True)


def test_another_number_of_steps_goes_on_at_the_same_place_in_the_data(world: World) -> None:
    _, saved = trained_and_saved(world)
    resumed = new_state(network_with_norm(), SCHEDULE)
    resumed.description["steps_per_epoch"] = 6
    assert "3 -> 6, the same place" in resumed.resume(saved | {"steps_per_epoch": 3}, Path("run"), world, force=True)
    assert (resumed.epoch, resumed.step) == (1, 6)
    resumed.resume(saved | {"step": 5}, Path("run"), world, force=True)
    assert (resumed.epoch, resumed.step) == (1, 10), "two thirds of the second epoch"
    older = {key: value for key, value in saved.items() if key != "steps_per_epoch"}
    with pytest.raises(CheckpointError, match=r"how many steps an epoch had\. fix: train\.batch_size"):
        resumed.resume(older, Path("run"), world, force=True)


def test_the_count_of_images_of_an_older_checkpoint_is_kept(world: World) -> None:
    _, saved = trained_and_saved(world)
    saved["network"]["seen"] = saved.pop("seen") + 100
    resumed = new_state(network_with_norm(), SCHEDULE)
    resumed.resume(saved, Path("run"), world, force=False)
    assert resumed.seen == 124


def test_each_rank_gets_its_own_generators_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a made-up CUDA: dropout on a GPU draws from that generator."""
    on_device = [torch.tensor([7, 8], dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: on_device[0])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: on_device.__setitem__(0, state))
    _, saved = trained_and_saved(world)
    drawn = torch.rand(3)
    saved |= {
        "world_size": 2,
        "rng": [torch.zeros(0), saved["rng"][0]],
        "cuda_rng": [torch.zeros(0), saved["cuda_rng"][0]],
    }
    on_device[0] = torch.tensor([1, 2], dtype=torch.uint8)
    resumed = new_state(network_with_norm(), SCHEDULE)
    resumed.resume(saved, Path("run"), replace(world, rank=1, world_size=2), force=False)
    assert on_device[0].tolist() == [7, 8] and torch.equal(torch.rand(3), drawn)


@pytest.mark.parametrize("scales", [(None, 8.0), (8.0, None)])
def test_a_forced_resume_may_turn_the_loss_scale_on_or_off(world: World, scales: tuple[float | None, ...]) -> None:
    before, after = (new_state(network_with_norm(), SCHEDULE, scale) for scale in scales)
    saved = before.to_plain()
    assert saved is not None
    after.resume(to_plain(saved, copied=True), Path("run"), world, force=True)
    assert after.scaler.get_scale() == (scales[1] or 1.0)
