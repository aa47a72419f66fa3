"""Parameter groups, schedule and weight average against their formulas."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from conf.schema import Decay, Optimizer
from tests.train_utils.small_training import CONFIG
from train_utils.optim import Schedule, WeightAverage, make_optimizer


def small_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))


@torch.no_grad()
def change(model: nn.Module, by: int) -> None:
    for value in model.state_dict().values():
        value.add_(by)


def test_three_groups_hold_every_trainable_parameter_once_and_only_kernels_decay() -> None:
    model = small_model().append(nn.Linear(3, 2, bias=False))  # as a plugin's layer may have
    model[2].weight.requires_grad_(False)  # frozen
    optimizer = make_optimizer(model, CONFIG)
    Schedule(CONFIG, 10, 100).apply(optimizer, step=50)
    groups = {group["name"]: group for group in optimizer.param_groups}
    assert groups["convolution"]["params"] == [model[0].weight, model[3].weight]
    assert groups["norm"]["params"] == [model[1].weight]
    assert groups["bias"]["params"] == [model[1].bias, model[2].bias]
    assert [groups[name]["weight_decay"] for name in ("convolution", "norm", "bias")] == [5e-4, 0, 0]
    assert all(group["nesterov"] and group["momentum"] == pytest.approx(0.937) for group in optimizer.param_groups)


def test_adamw_takes_its_first_beta_and_decay_from_the_schedule() -> None:
    config = replace(CONFIG, name=Optimizer.adamw, lr=0.001, momentum=0.9, weight_decay=0.1)
    schedule, optimizer = Schedule(config, 10, 100), make_optimizer(small_model(), config)
    assert isinstance(optimizer, torch.optim.AdamW)
    for step in (0, 30, 99):
        schedule.apply(optimizer, step)
        for group in optimizer.param_groups:
            assert group["betas"] == pytest.approx((0.9, 0.999))
            decay = 0.1 * schedule.warmup(step) if group["name"] == "convolution" else 0
            assert group["weight_decay"] == pytest.approx(decay)


def test_rates_during_and_after_warmup() -> None:
    schedule = Schedule(CONFIG, steps_per_epoch=10, total_steps=400)
    assert schedule.warmup_steps == 40
    optimizer = make_optimizer(small_model(), CONFIG)
    for step in range(400):
        schedule.apply(optimizer, step)
        cosine = 0.05 + 0.95 * (1 + math.cos(math.pi * step / 399)) / 2
        done = min(1, (step + 1) / 40)
        rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
        assert rates["convolution"] == rates["norm"] == pytest.approx(0.01 * cosine * done)
        assert rates["bias"] == pytest.approx(0.1 * (1 - done) + 0.01 * cosine * done)
        kernels = optimizer.param_groups[0]
        assert (kernels["momentum"], kernels["weight_decay"]) == pytest.approx((0.9 + 0.037 * done, 5e-4 * done))
    assert schedule.lr_factor(399) == pytest.approx(0.05)


def test_only_short_trainings_keep_their_rate_for_half_of_their_steps_by_default() -> None:
    config = replace(CONFIG, flat_fraction="auto")
    assert [config.flat_share(steps) for steps in (1, 2000, 2001)] == [0.5, 0.5, 0.0]


@pytest.mark.parametrize("flat", [0.0, 0.2, 0.5])
@pytest.mark.parametrize(("decay", "halfway"), [(Decay.linear, 0.525), (Decay.cosine, 0.525), (Decay.constant, 1.0)])
def test_decays_meet_their_ends(decay: Decay, halfway: float, flat: float) -> None:
    schedule = Schedule(replace(CONFIG, decay=decay, flat_fraction=flat), steps_per_epoch=1, total_steps=101)
    begins = round(100 * flat)
    assert {schedule.lr_factor(step) for step in (0, begins // 2, begins)} == {1}
    assert schedule.lr_factor((begins + 100) // 2) == pytest.approx(halfway)
    assert schedule.lr_factor(100) == pytest.approx(1 if decay is Decay.constant else 0.05)


def test_warmup_never_swallows_a_short_training_and_biases_start_fast_with_plain_sgd_only() -> None:
    assert Schedule(CONFIG, 13, 520).warmup_steps == 52
    assert Schedule(CONFIG, 100, 30_000).warmup_steps == 500
    assert Schedule(CONFIG, 1000, 300_000).warmup_steps == 3000
    assert Schedule(replace(CONFIG, warmup_epochs=0), 100, 30_000).warmup_steps == 0
    for name, start in {"sgd": 10, "darknet": 1, "adamw": 1}.items():
        config = replace(CONFIG, name=Optimizer(name))
        Schedule(config, 10, 10_000).apply(optimizer := make_optimizer(small_model(), config), 0)
        assert optimizer.param_groups[2]["lr"] == pytest.approx(0.01 * start, rel=0.01), name


def test_the_average_covers_a_share_of_the_steps_and_the_statistics_are_those_of_the_last_step() -> None:
    model = small_model()
    schedule = Schedule(replace(CONFIG, ema_decay=0.25), 10, 100)
    average = WeightAverage(model, schedule.ema_decay)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for update in range(1, 6):
        change(model, update)
        average.update()
        weight = max(1 / (1 + 0.08 * update), 0.75)  # ema_decay limits it from update 5 on
        for name, value in model.named_parameters():
            expected[name] = expected[name].lerp(value.detach(), weight)
        expected |= {name: value.clone() for name, value in model.named_buffers()}
    for name, value in average.module.state_dict().items():
        assert torch.allclose(value, expected[name], rtol=1e-6), name
    for name, value in model.named_buffers():
        assert torch.equal(average.module.get_buffer(name), value), name
    assert average.updates == 5 and not average.module.training
