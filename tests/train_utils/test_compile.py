"""Compiled steps against eager ones, and what is traced as one graph."""

import copy
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import train_utils.auto
import train_utils.compile
from conf import TrainError
from conf.cli import launch
from conf.compose import compose
from conf.schema import Compile, Precision, TrainConfig, TrainSection
from data import Batch, TrainBatchSampler, TrainSampler
from data.samplers import MultiScale
from models import Darknet, zoo_cfg
from models.cfg import ZOO
from tests.models.small_network import small
from tests.train_utils.losses import COST, GRAPHS, LOSSES, loss_of
from tests.train_utils.small_training import CONFIG, WORLD, mean_loss, network_with_norm, new_state, train_epoch
from train_utils import distributed
from train_utils.auto import choose_mode, fuses_norm
from train_utils.compile import INPUT_ONLY, compile_step
from train_utils.distributed import World, wrap_ddp
from train_utils.engine import ForwardPass
from train_utils.optim import Schedule
from train_utils.sync_batchnorm import convert_sync_batchnorm
from train_utils.train_state import TrainState

TARGETS = torch.tensor([[0, 1, 20, 20, 10, 12], [0, 0, 40, 12, 33, 20], [1, 1, 30, 40, 30, 22.0]])


def training_options(compile: str = "auto", **options: Any) -> TrainSection:
    return replace(compose("train", TrainConfig, ["data=shapes"]).train, compile=Compile(compile), **options)


def batch(side: int, targets: Tensor = TARGETS) -> Batch:
    images = torch.randint(0, 256, (2, side, side, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    nothing = torch.zeros(0, 4, dtype=torch.float64)
    return Batch(images.permute(0, 3, 1, 2), targets, torch.arange(2), nothing, torch.full((2, 3), 1.1))


class Training(NamedTuple):
    """A training with a simple loss, and what goes into its loop."""

    state: TrainState
    loss: Any
    epoch: Any  # train_epoch with the rest of its arguments


def new_compiled_training(mode: str, accumulate: int = 1, precision: torch.dtype | None = None) -> Training:
    torch._dynamo.reset()
    model = network_with_norm().train()
    convert_sync_batchnorm(model, WORLD)
    schedule = Schedule(CONFIG, 1, 40)
    state = new_state(model, schedule, 8.0 if precision is torch.float16 else None)
    loss: Any = mean_loss
    to_input: Any = Batch.network_input
    if mode != "off":
        loss, to_input = compile_step(model, loss, to_input, mode, 2)
    epoch = partial(
        train_epoch, state, world=WORLD, accumulate=accumulate, to_input=to_input, autocast_dtype=precision, limit=3
    )
    return Training(state, loss, epoch)


def losses_of(training: Training, sides: Sequence[int], broken: int | None = None) -> list[float]:
    """The losses of passes over images of these sides; that of pass ``broken`` is then NaN."""
    losses = []

    def sums(*args: Any) -> Any:
        parts, divisor = training.loss.sums(*args)
        losses.append(float(parts.total.detach()))
        return parts._replace(box=parts.box * torch.nan) if len(losses) - 1 == broken else parts, divisor

    def passes() -> Iterator[Batch]:
        for side in sides:
            yield batch(side)

    training.epoch(passes(), loss=SimpleNamespace(count_positives=training.loss.count_positives, sums=sums))
    return losses


def assert_same_weights(one: Training, other: Training, rtol: float, atol: float) -> None:
    found, expected = one.state.model.state_dict(), other.state.model.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=name)


def detector() -> Darknet:
    torch.manual_seed(0)
    return small()


@pytest.fixture
def traced_only(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile without its code generator, which takes long, or also without its autograd."""
    compile, backend = torch.compile, getattr(request, "param", "aot_eager")
    monkeypatch.setattr(torch, "compile", lambda *args, **named: compile(*args, backend=backend, **named))


GRAPHS_ALONE = pytest.mark.parametrize("traced_only", ["eager"], indirect=True)


GPU = World(0, 0, 1, 1, 1, torch.device("cuda", 0), "none")


def test_what_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(TrainError, match=r"rect=true gives hundreds .*fix: train\.compile=off or train.rect=false"):
        choose_mode(training_options(compile="default", rect=True), GPU)


@pytest.mark.parametrize(
    ("world", "mode", "triton", "sentence"),
    [
        (WORLD, "auto", True, "needs a GPU, Triton and a C.. compiler. fix: train.fused_norm=false"),
        (GPU, "auto", False, "needs a GPU, Triton and a C.. compiler. fix: train.fused_norm=false"),
        (GPU, "default", True, "kernels that train.compile=default makes. fix: leave one out"),
    ],
)
def test_a_fused_norm_that_cannot_run_is_refused(world, mode, triton, sentence, monkeypatch) -> None:
    monkeypatch.setattr(train_utils.auto, "is_installed", lambda module: triton)
    monkeypatch.setattr(launch, "compiler", lambda: "/usr/bin/g++")
    with pytest.raises(TrainError, match=sentence):
        choose_mode(training_options(mode, fused_norm=True), world)
    auto, off = (choose_mode(training_options(mode, fused_norm=value), world) for value in ("auto", False))
    assert auto == off
    with pytest.raises(ValueError, match=r"train.fused_norm must be auto, true or false, got 1"):
        training_options(fused_norm=1)


@pytest.mark.parametrize(
    ("world", "options", "triton", "chosen"),
    [
        (GPU, {}, True, "default"),
        (replace(GPU, world_size=4), {}, True, "default"),
        (GPU, {"multi_scale": [0.5, 1.0]}, True, INPUT_ONLY),
        (GPU, {"rect": True}, True, INPUT_ONLY),
        (GPU, {}, False, "off"),
        (WORLD, {}, True, "off"),
    ],
)
def test_auto_compiles_where_it_pays(world, options, triton, chosen, monkeypatch) -> None:
    monkeypatch.setattr(train_utils.auto, "is_installed", lambda module: triton)
    monkeypatch.setattr(launch, "compiler", lambda: "/usr/bin/g++")
    assert choose_mode(training_options(**options), world) == chosen
    monkeypatch.setattr(launch, "compiler", lambda: None)
    assert choose_mode(training_options(**options), world) == "off"


def test_auto_compiles_what_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quickstart never; yolov3-spp at 640 pixels from 261,000 images on, for each process."""
    modes: list[str] = []
    monkeypatch.setattr(distributed, "wrap_ddp", lambda model, world: model)
    compiled = lambda *given, log_line: (modes.append(given[3]), None)  # noqa: E731
    monkeypatch.setattr(train_utils.compile, "compile_step", compiled)
    with torch.device("meta"):
        small_one, large = Darknet(zoo_cfg("yolov3-tiny-decoupled"), 5, 0.5), Darknet(zoo_cfg("yolov3-spp"), 80)
    for model, side, images, ranks, mode, chosen in (
        (small_one, 160, 16_000, 1, "auto", []), (large, 640, 250_000, 1, "auto", []),
        (large, 640, 270_000, 1, "auto", ["default"]), (large, 640, 270_000, 2, "auto", []),
        (large, 640, 640, 1, "default", ["default"]),
    ):  # fmt: skip
        modes.clear()
        options = training_options(compile=mode, epochs=10, image_size=side, batch_size=10)
        one_size = MultiScale(side, 1, 1, 32, 0)
        sampler = TrainSampler(images // 10, one_size, batch_size=10, num_replicas=ranks, rank=0, seed=0)
        world = replace(WORLD, world_size=ranks)
        batches = TrainBatchSampler(sampler)
        ForwardPass.create(
            model, mean_loss, options, compile_mode="default", batches=batches, world=world, log_line=print
        )
        assert modes == chosen, (images, ranks, mode)


def test_auto_fuses_where_a_gpu_was_seen_to_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """yolov3-spp at 640 pixels with 64 images at once does, with 16 it is slower."""
    monkeypatch.setattr(train_utils.auto, "can_generate_code", lambda: True)
    with torch.device("meta"):
        network = Darknet(zoo_cfg("yolov3-spp"), 80)
    usual, pair = {"precision": Precision.bfloat16, "compile": "auto", "image_size": 640}, replace(GPU, world_size=2)
    for images, world, options, expected in (
        (64, GPU, {}, True), (64, GPU, {"precision": Precision.float16, "compile": "off"}, True), (16, GPU, {}, False),
        (64, GPU, {"image_size": 320}, False), (64, GPU, {"precision": Precision.float32}, False),
        (64, GPU, {"compile": "default"}, False), (64, pair, {}, False), (64, WORLD, {}, False),
        (64, GPU, {"fused_norm": False}, False), (16, pair, {"fused_norm": True}, True),
    ):  # fmt: skip
        given = training_options(**usual | options)
        assert fuses_norm(given, world, network, images) == expected, (images, world, options)


@GRAPHS_ALONE
def test_colours_alone_are_one_graph_for_all_sizes(traced_only: None) -> None:
    _, to_input = compile_step(nn.Identity(), mean_loss, Batch.network_input, INPUT_ONLY, 1)
    for side in (64, 96, 32):
        torch.testing.assert_close(to_input(batch(side)), batch(side).network_input())
    with torch.compiler.set_stance("fail_on_recompile"):
        to_input(batch(48))


@pytest.mark.release
@GRAPHS_ALONE
def test_ranks_break_no_graph(traced_only: None) -> None:
    """Neither DDP nor the loss with its exchange; in a group that no other rank has to join."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        world = replace(WORLD, world_size=2)
        model = detector()
        plain = loss_of(model.heads, *LOSSES[0])
        loss, to_input = compile_step(model, plain, Batch.network_input, "default", 1)
        torch._dynamo.utils.counters.clear()
        forward = ForwardPass(wrap_ddp(model, world), loss, to_input, None, world)
        forward(to_input(batch(64)), TARGETS, forward.positives_per_image([TARGETS], 2), 0.5)
        assert not torch._dynamo.utils.counters["graph_break"]
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.release
@pytest.mark.skipif(shutil.which("g++") is None or sys.platform != "linux", reason="needs a C++ compiler")
def test_generated_code_trains_alike_and_resumes_to_the_bit(tmp_path: Path) -> None:
    eager, compiled = (
        new_compiled_training(mode, accumulate=2, precision=torch.float16) for mode in ("off", "default")
    )
    sides = (16,) * 6
    assert losses_of(compiled, sides, broken=3) == pytest.approx(losses_of(eager, sides, broken=3), rel=1e-2)
    assert_same_weights(compiled, eager, rtol=1e-2, atol=1e-3)
    assert compiled.state.scaler.get_scale() == eager.state.scaler.get_scale() == 8
    compiled.state.epoch = compiled.state.step  # its schedule has one step an epoch
    assert compiled.state.average.module._compiled_call_impl is None
    saved = copy.deepcopy(compiled.state.to_plain())
    with torch.compiler.set_stance("fail_on_recompile"):
        expected = losses_of(compiled, sides)
    resumed = new_compiled_training("default", accumulate=2, precision=torch.float16)
    assert saved is not None
    resumed.state.resume(saved, tmp_path, WORLD)
    assert losses_of(resumed, sides) == expected
    assert_same_weights(resumed, compiled, rtol=0, atol=0)


@pytest.mark.release
@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize(  # by cost it differs in the ranking alone
    ("options", "traced_only"),
    [(one, "eager" if one == COST else "aot_eager") for one in GRAPHS],
    indirect=["traced_only"],
)
def test_a_compiled_loss_is_one_graph_for_all_numbers_of_boxes(options: tuple[str, ...]) -> None:
    model = detector()
    count = 2 if options == COST else 1  # heads, which it ranks together; one saves time
    plain = loss_of(model.heads[:count], *options)
    compiled, _ = compile_step(model, plain, Batch.network_input, "default", 1)
    maps = [raw.detach() for raw in model(torch.rand(2, 3, 64, 64))[:count]]
    for ratio, boxes, refines in ((0.3, 3, False), (0.7, 0, False), (1.0, 3, True)):
        found = []
        for loss in (plain, compiled):
            raw = [each.clone().requires_grad_() for each in maps]
            parts, divisor = loss.sums(raw, TARGETS[:boxes], loss.count_positives(TARGETS), ratio, refines)
            parts.total.backward()
            found.append([*parts, divisor, *(each.grad for each in raw)])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
        with torch.compiler.set_stance("fail_on_recompile"):
            compiled.sums(raw, TARGETS[:1], loss.count_positives(TARGETS), 0.5, refines)


@pytest.mark.release
def test_every_kind_of_layer_in_the_zoo_is_one_graph() -> None:
    kinds: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {}

    def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        kinds[re.sub(r"\d+", "", repr(layer))] = layer, tuple(x.detach().clone() for x in inputs)

    for name in ZOO:
        model = Darknet(zoo_cfg(name), num_classes=2, width=0.125)
        for layer in model.layers:
            layer.register_forward_pre_hook(note)
        model(torch.rand(2, 3, 2 * model.max_stride, 2 * model.max_stride))
    assert len(kinds) >= 10
    for layer, inputs in kinds.values():
        layer._forward_pre_hooks.clear()
        torch._dynamo.reset()
        torch.compile(layer, backend="eager", fullgraph=True, dynamic=False)(*inputs)
