"""A training step in the eyes of an accelerator: what waits for it, and how much it is given."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from conf.schema import Optimizer
from data import Batch
from models import Darknet, zoo_cfg
from tests.data.sets import a_few_of
from tests.models.small_network import small
from tests.train_utils.losses import COST, LOSSES, loss_of
from tests.train_utils.small_training import CONFIG, new_state, train_epoch
from train_utils.distributed import World, init_distributed_mode
from train_utils.numerics import DTYPES
from train_utils.optim import Schedule

# Their result, or its size, is a number that the host has to know.
READING = set(
    """aten::_local_scalar_dense aten::nonzero aten::bincount aten::masked_select aten::equal aten::_unique
    aten::_unique2 aten::unique_dim aten::unique_consecutive aten::unique_dim_consecutive aten::histc
    torchvision::nms""".split()
)
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
# They move whole tensors, which on CPU tensors leaves no operator to see.
TO_HOST = {Tensor.cpu, Tensor.tolist}
FROM_HOST = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
# No kernel runs. What returns a view of its argument is found by its schema.
NO_LAUNCH = (
    *("aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::_local_scalar_dense", "aten::lift_fresh"),
    *("profiler::", "c10d::"),
)


class HostReads(TorchDispatchMode):
    """Within the context it notes ``reads``, ``copies`` and ``launches``, by operator.

    It works on CPU tensors, as if each were on the device, but for those that it is given. It sees
    the operators of its own thread, those of backward passes included.

    ``reads``: reads of a value or size by the host, and copies of a tensor to it that block.
    ``copies``: of Python numbers to the device, which block as well. ``launches``: operators that
    start a kernel; one of torch's multi-tensor operators counts once.
    """

    def __init__(self, *on_host: Tensor) -> None:
        super().__init__()
        self.on_host = on_host
        self.reads: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self._calls = _Calls(self)

    def __repr__(self) -> str:
        launched = ", ".join(f"{name} {count}" for name, count in self.launches.most_common(12))
        return f"reads {dict(self.reads)}, copies {dict(self.copies)}, {self.launches.total()} launches: {launched}"

    def __enter__(self) -> "HostReads":
        super().__enter__()
        self._calls.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.__exit__(kind, error, trace)
        super().__exit__(kind, error, trace)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and func._can_decompose():  # else it arrives as its parts
            with self, torch._C.DisableTorchFunction():
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        name = func._schema.name
        if name in READING or (name in INDEXING and _by_mask(args)) or _repeats_unknown(name, args, kwargs):
            self.reads[name] += 1
        returned = [one.alias_info for one in func._schema.returns]
        if not name.startswith(NO_LAUNCH) and not any(alias and not alias.is_write for alias in returned):
            self.launches[name] += 1
        return func(*args, **kwargs)


class _Calls(TorchFunctionMode):
    def __init__(self, counted: HostReads) -> None:
        super().__init__()
        self._counted = counted

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to_host = func in TO_HOST or (func is Tensor.to and "cpu" in (*args[1:], *kwargs.values()))
        if to_host and not kwargs.get("non_blocking") and all(args[0] is not one for one in self._counted.on_host):
            self._counted.reads[resolve_name(func) or str(func)] += 1
        elif func in FROM_HOST and not isinstance(args[0], Tensor):
            self._counted.copies[resolve_name(func) or str(func)] += 1
        return func(*args, **kwargs)


def _by_mask(args: Any) -> bool:
    """Whether a mask is among the indices, so that its true elements have to be counted."""
    masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    filled = len(args) > 2 and args[2].numel() == 1  # one value under a mask is filled in without counting
    return masked and not filled


def _repeats_unknown(name: str, args: Any, kwargs: Any) -> bool:
    return name == "aten::repeat_interleave" and kwargs.get("output_size") is None and isinstance(args[0], Tensor)


IMAGES = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
TARGETS = torch.tensor([[0, 1, 20, 20, 10, 12], [0, 0, 40, 12, 33, 20], [1, 1, 30, 40, 30, 22.0]])


@pytest.fixture(scope="module")
def world() -> World:
    return init_distributed_mode("cpu", 60)


def batch(targets: torch.Tensor = TARGETS) -> Batch:
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
    model = (
        model.to(world.device, torch.float64 if precision == "float64" else torch.float32)
        .to(memory_format=torch.channels_last)
        .train()
    )
    schedule = Schedule(replace(CONFIG, name=Optimizer(optim), clip_norm=10.0), 1, 40)
    state = new_state(model, schedule, 8.0 if precision == "float16" else None)
    state.loss_sums = state.loss_sums.to(world.device)
    for group in state.optimizer.param_groups:
        group["foreach"] = not group["fused"]
    return partial(
        train_epoch, state, world=world, accumulate=accumulate, loss=loss_of(model.heads, *loss),
        to_input=Batch.network_input, autocast_dtype=DTYPES.get(precision), limit=9,
    )  # fmt: skip


def counted(given: list[Batch], counts: list[HostReads]) -> Iterator[Batch]:
    """Each batch, and what the loop does with it until it asks for the next one."""
    for each in given:
        with HostReads(each.indices) as reads:
            counts.append(reads)
            yield each


@pytest.mark.parametrize(
    ("loss", "optim", "precision"),
    [*((loss, "sgd", "bfloat16") for loss in LOSSES), *((COST, "adamw", name) for name in ("float64", "float16"))],
)
def test_a_step_is_queued_without_a_wait_but_for_its_decision(world, loss, optim, precision) -> None:
    steps: list[HostReads] = []
    epoch = epoch_on_cuda(world, small(2), loss, precision, accumulate=2, optim=optim)
    epoch(counted([batch(), batch(TARGETS[:0]), batch(), batch(TARGETS[:0])], steps))
    for only_loaded, of_step in (steps[:2], steps[2:]):
        assert not only_loaded.reads, only_loaded
        assert of_step.reads.total() == 1, of_step
    assert not any(each.copies for each in steps[2:]), "only the first step copies the anchors"


@pytest.mark.parametrize(("loss", "most"), a_few_of([(LOSSES[0], 1366), (COST, 1469), (("loss=darknet",), 1219)]))
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
    # torch also warns, once a process, that this mode is a prototype which does not see all waits.
    messages = [str(warning.message) for warning in caught if "prototype" not in str(warning.message)]
    assert sum("synchronizing" in message for message in messages) == 1, messages
