"""Frozen layers that are released between two steps, with every option that touches a pass."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data import Batch
from models import Darknet, IouKind, LossConfig, YoloLoss, parse_cfg
from models.config import Balance, PositivesBy
from tests.models.cfg_writer import cfg, conv, head
from tests.runs.process_group import run_group
from tests.train_utils.parallel.test_compiled import batch, square_loss
from tests.train_utils.small_training import CONFIG, new_state, new_step
from train_utils.config import Optimizer
from train_utils.distributed import World, init_distributed_mode
from train_utils.loop.step import OptimiserStep
from train_utils.optim import Schedule
from train_utils.parallel.compiled import compile_step
from train_utils.parallel.wrap import convert_sync_batchnorm, wrap_model

NETWORK = cfg(conv(6, 3, 2), conv(8, 3, 2, "mish"), head(0, 1), side=32)
FROZEN = 1  # of its layers


@pytest.fixture(scope="module")
def world() -> World:
    return init_distributed_mode("cpu", 60)


def partly_frozen(
    world: World,
    frozen: int,
    accumulate: int = 1,
    precision: torch.dtype | None = None,
    layout: torch.memory_format = torch.contiguous_format,
    optimizer: Optimizer = Optimizer.sgd,
    compiled: bool | None = None,
) -> OptimiserStep:
    """The step of a small detector whose first layers are frozen; made as train.py makes it.

    ``compiled``: None for the loss of a training, else one that is traced at once.
    """
    torch.manual_seed(0)
    model = Darknet(parse_cfg(NETWORK, "small.cfg")).to(memory_format=layout)
    convert_sync_batchnorm(model, world, compiled=compiled)
    schedule = Schedule(replace(CONFIG, name=optimizer, lr=1e-3), 2, 40)
    state = new_state(model, schedule, 8.0 if precision is torch.float16 else None)
    model.freeze(frozen)
    loss: Any = square_loss
    to_input: Any = Batch.network_input
    if compiled is None:
        loss = YoloLoss(
            model.heads,
            LossConfig(
                "yolov3",
                3.5,
                64.0,
                37.0,
                IouKind.ciou,
                0.2,
                None,
                Balance.equal,
                PositivesBy.shape,
                None,
            ),
        )
    elif compiled:
        loss, to_input = compile_step(model, loss, to_input, "default", 1, print)
    wrapped = wrap_model(model, world)
    step = new_step(world, state, schedule, accumulate, loss, wrapped, limit=1, autocast_dtype=precision)
    step.to_input = to_input
    return step


def make_steps(step: OptimiserStep, count: int) -> None:
    for _ in range(count):
        while not step.full:
            own = batch(32)
            step.add(replace(own, images=own.images.roll(step.world.rank, dims=2)))
        assert not step.update().skip


def release(step: OptimiserStep) -> None:
    model = step.state.model
    assert isinstance(model, Darknet)
    model.freeze(0)
    step.release(2 * model.max_stride)


def values(step: OptimiserStep) -> dict[str, Tensor]:
    """Weights, statistics and what the optimiser keeps, as copies."""
    kept = step.state.optimizer.state_dict()["state"]
    found = {f"{number}.{name}": value for number, row in kept.items() for name, value in row.items()}
    return copy.deepcopy({**step.state.model.state_dict(), **found})


PASSES = [  # numbers and formats of all pairs, with layouts and optimisers in turn
    (
        accumulate,
        precision,
        (torch.contiguous_format, torch.channels_last)[number % 2],
        list(Optimizer)[number // 2 % 2],
    )
    for number, (accumulate, precision) in enumerate(itertools.product((1, 2), (None, torch.float16, torch.bfloat16)))
]


@pytest.mark.parametrize("options", PASSES, ids=str)
def test_a_run_resumed_at_the_release_is_the_uninterrupted_one(
    world: World, tmp_path: Path, options: tuple[Any, ...]
) -> None:
    step = partly_frozen(world, FROZEN, *options)
    before = values(step)
    make_steps(step, 2)
    still = {name for name in before if int(name.split(".")[1]) < FROZEN}
    frozen = values(step)
    moved = {name for name in before if not torch.equal(before[name], frozen[name])}
    assert still and not moved & still and moved == before.keys() - still
    saved = copy.deepcopy(step.state.to_plain())
    assert saved is not None

    release(step)
    make_steps(step, 2)
    found = values(step)
    assert all(not torch.equal(before[name], found[name]) for name in before)
    resumed = partly_frozen(world, 0, *options)
    resumed.state.resume(saved, tmp_path, world, force=False)
    make_steps(resumed, 2)
    expected = values(resumed)
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def released(world: World) -> list[dict[str, Tensor]]:
    """What an eager and a compiled step leave, two steps before and two after the release."""
    compile = torch.compile
    found = []
    try:  # without its code generator, which takes long
        setattr(torch, "compile", lambda *args, mode, **named: compile(*args, backend="aot_eager", **named))  # noqa: B010
        for compiled in (False, True):
            step = partly_frozen(world, FROZEN, accumulate=2, compiled=compiled)
            make_steps(step, 2)
            release(step)
            make_steps(step, 1)
            with torch.compiler.set_stance("fail_on_recompile"):
                make_steps(step, 1)
            found.append(values(step))
    finally:
        setattr(torch, "compile", compile)  # noqa: B010
    return found


def released_on_a_rank() -> list[dict[str, Any]]:
    found = released(init_distributed_mode("cpu", 60))
    return [{name: value.numpy() for name, value in each.items()} for each in found]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_compiled_step_trains_released_layers_as_an_eager_one(processes: int) -> None:
    """The network is compiled once more where layers are released, and not after that."""
    ranks = run_group(released_on_a_rank, processes)
    eager, compiled = ranks[0]
    assert eager.keys() == compiled.keys()
    for name, value in eager.items():
        np.testing.assert_allclose(compiled[name], value, rtol=1e-3, atol=1e-4, err_msg=name)
    for rank, number in itertools.product(ranks[1:], (0, 1)):
        for name, value in ranks[0][number].items():
            np.testing.assert_array_equal(rank[number][name], value, err_msg=name)
