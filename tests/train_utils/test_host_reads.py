"""A training step in the eyes of an accelerator: what waits for it, and how much it is given."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from conf.network import build_loss
from data import Batch
from models import Darknet, zoo_cfg
from tests.host_reads import HostReads
from tests.models.small_network import small
from tests.train_utils.losses import COST, LOSSES, loss_options
from tests.train_utils.small_training import CONFIG, new_state, train_epoch
from train_utils.config import Optimizer
from train_utils.distributed import World, init_distributed_mode
from train_utils.numerics import DTYPES, weights_dtype
from train_utils.optim import Schedule

IMAGES = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
TARGETS = torch.tensor([[0, 1, 20, 20, 10, 12], [0, 0, 40, 12, 33, 20], [1, 1, 30, 40, 30, 22.0]])


@pytest.fixture(scope="module")
def world() -> World:
    return init_distributed_mode("cpu", 60)


def batch(targets: torch.Tensor = TARGETS) -> Batch:
    """Two images with new colours."""
    nothing = torch.zeros(0, 4, dtype=torch.float64)
    return Batch(IMAGES.permute(0, 3, 1, 2), targets, torch.arange(2), nothing, torch.full((2, 3), 1.1))


def epoch_on_cuda(
    world: World,
    model: Darknet,
    loss: tuple[str, ...],
    precision: str = "float32",
    accumulate: int = 1,
    optim: str = "sgd",
) -> Callable[[Iterable[Batch]], object]:
    """The loop as on one GPU: torch's batch norm and its multi-tensor optimiser, but on the CPU."""
    model = model.to(world.device, weights_dtype(precision)).to(memory_format=torch.channels_last).train()
    schedule = Schedule(replace(CONFIG, name=Optimizer(optim), clip_norm=10.0), 1, 40)
    state = new_state(model, schedule, 8.0 if precision == "float16" else None)
    state.loss_sums = state.loss_sums.to(world.device)
    for group in state.optimizer.param_groups:
        group["foreach"] = not group["fused"]
    return partial(
        train_epoch, world, state, accumulate=accumulate, loss=build_loss(model.heads, loss_options(*loss)),
        to_input=Batch.network_input, autocast_dtype=DTYPES.get(precision), limit=9,
    )  # fmt: skip


def counted(given: list[Batch], counts: list[HostReads]) -> Iterator[Batch]:
    """Each batch, and what the loop does with it until it asks for the next one."""
    for each in given:
        with HostReads(each.indices) as reads:
            counts.append(reads)
            yield each


@pytest.mark.parametrize(("loss", "optim"), [*((loss, "sgd") for loss in LOSSES), (LOSSES[0], "adamw")])
@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16", "float16"])
def test_a_step_is_queued_without_a_wait_but_for_its_decision(
    world: World, loss: tuple[str, ...], optim: str, precision: str
) -> None:
    steps: list[HostReads] = []
    epoch = epoch_on_cuda(world, small(2), loss, precision, accumulate=2, optim=optim)
    epoch(counted([batch(), batch(TARGETS[:0]), batch(), batch(TARGETS[:0])], steps))
    for only_pass, with_update in (steps[:2], steps[2:]):
        assert not only_pass.reads, only_pass
        assert with_update.reads.total() == 1, with_update
    assert not any(each.copies for each in steps[1:]), "only the first pass copies the anchors"


@pytest.mark.parametrize(("loss", "most"), [(LOSSES[0], 1324), (COST, 1548), (("loss=darknet",), 1236)])
def test_a_step_of_yolov3_spp_starts_few_kernels(world: World, loss: tuple[str, ...], most: int) -> None:
    steps: list[HostReads] = []
    epoch_on_cuda(world, Darknet(zoo_cfg("yolov3-spp"), 80, width=0.125), loss)(counted([batch(), batch()], steps))
    assert steps[1].launches.total() <= most, steps[1]


@pytest.mark.gpu
def test_on_a_real_gpu_torch_finds_no_other_wait() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    world = World(0, 0, 1, 1, 1, torch.device("cuda", 0), "none")
    epoch = epoch_on_cuda(world, Darknet(zoo_cfg("yolov3-spp"), 80, width=0.25), LOSSES[0], "bfloat16")

    def watched() -> Iterator[Batch]:
        yield from (batch(), batch())
        torch.cuda.set_sync_debug_mode("warn")
        yield batch().pin_memory()
        torch.cuda.set_sync_debug_mode("default")

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            epoch(watched())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ["synchronizing" in str(warning.message) for warning in caught].count(True) == 1, caught
