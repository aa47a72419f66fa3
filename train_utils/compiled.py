"""torch.compile for a training step: the batch's floats, the network and the loss, a graph each.

Sizes are static, so each image size of a multi-scale training has its graphs. Under DDP torch
splits the network's graph where DDP's buckets end, and the exchange of one bucket overlaps with the
rest of the backward pass. The module itself is not replaced: state dicts keep their names, and
copies of it, such as the weight average, are not compiled.

With CUDA graphs the results of a micro-batch lie in memory that the next one overwrites. Losses are
read before, and gradients that a later micro-batch adds to are copied out.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train_utils.distributed import World, sum_over_ranks
from train_utils.engine import Loss
from train_utils.errors import TrainError

CUDA_GRAPHS = "reduce-overhead"  # torch's name of the mode
TARGET_ROWS = 256  # targets are filled up to multiples of this, for few graphs of the loss
GRAPHS_OF_A_SIZE = 16  # at most: one for each multiple


def check_compiling(mode: str, world: World, rect: bool) -> None:
    """Raise TrainError for options that train.compile cannot go with, and where it cannot work."""
    if mode == "off":
        return
    if rect:
        raise TrainError(
            "train.rect=true gives hundreds of image sizes, and train.compile needs minutes for each. "
            "fix: train.compile=off or train.rect=false"
        )
    if mode == CUDA_GRAPHS and (world.device.type == "cpu" or world.world_size > 1):
        raise TrainError(
            f"train.compile={mode} is for one GPU and a process without a launcher such as torchrun. "
            "fix: train.compile=default"
        )
    check_tools(world.device)


def check_tools(device: torch.device) -> None:
    """Raise TrainError if what torch.compile builds its code with is not installed here."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # slow
    from torch.utils._triton import has_triton

    try:
        compiler = get_cpp_compiler()
    except RuntimeError:
        compiler = ""
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    for is_there, tool, fix in (
        (compiler, "a C++ compiler", "apt-get install g++"),
        (header.is_file(), f"{header}", "apt-get install python3-dev"),
        (device.type == "cpu" or has_triton(), "Triton and a GPU that Triton knows", "uv pip install triton"),
    ):
        if not is_there:
            raise TrainError(f"train.compile needs {tool}. fix: {fix}, or train.compile=off")


def compile_step(
    network: nn.Module,
    loss: Loss,
    to_input: Callable[[Any], Tensor],
    mode: str,
    sizes: int,
    log_line: Callable[[str], None],
) -> tuple[Loss, Callable[[Any], Tensor]]:
    """Compile ``network`` in place; return ``loss`` and ``to_input`` compiled, too.

    ``mode`` is one of torch.compile, and ``sizes`` the number of image sizes. Each is compiled in
    its first step. ``log_line`` then gets a line with the seconds. With ``off`` all stays.
    """
    if mode == "off":
        return loss, to_input
    import torch._dynamo  # slow

    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, sizes * GRAPHS_OF_A_SIZE)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, sizes * GRAPHS_OF_A_SIZE)
    network.compile(mode=mode, dynamic=False)
    return _CompiledLoss(loss, mode), _CompiledInput(to_input, mode, log_line, list(network.parameters()))


class _CompiledLoss:
    """A loss on targets filled up with rows of zeros, which count for nothing."""

    def __init__(self, loss: Loss, mode: str) -> None:
        def parts(maps: list[Tensor], targets: Tensor, ratio: Any, world_size: int) -> Any:
            # Without a clock around it, which could not be compiled.
            return loss(maps, targets, objectness_ratio=ratio, sum_over_ranks=sum_over_ranks, world_size=world_size)

        self._eager, self._is_prepared = loss, False
        self._parts = torch.compile(parts, mode=mode, dynamic=False, fullgraph=True)

    def __call__(
        self,
        raw_maps: Sequence[Tensor],
        targets: Tensor,
        *,
        objectness_ratio: float,
        sum_over_ranks: Callable[[Tensor], Tensor],
        world_size: int,
    ) -> Any:
        """The parts of the loss; the exchange between ranks lies in its graph."""
        if not self._is_prepared:  # what a loss keeps for a device, such as its anchors, is to be no part of its graph
            with torch.no_grad():
                self._eager(raw_maps, targets, objectness_ratio=1.0, sum_over_ranks=lambda tensor: tensor, world_size=1)
            self._is_prepared = True
        missing = max(len(targets), 1) + -max(len(targets), 1) % TARGET_ROWS - len(targets)
        # A number would be a constant of the graph, and each step of the burn-in has another.
        ratio = torch.full((), objectness_ratio, device=targets.device)
        return self._parts(list(raw_maps), F.pad(targets, (0, 0, 0, missing)), ratio, world_size)


class _CompiledInput:
    """The compiled ``to_input``, called first in a micro-batch: it tells what the last one cost.

    With CUDA graphs it also ends the life of the last one's results.
    """

    def __init__(
        self,
        to_input: Callable[[Any], Tensor],
        mode: str,
        log_line: Callable[[str], None],
        parameters: list[nn.Parameter],
    ) -> None:
        self._to_input = torch.compile(to_input, mode=mode, dynamic=False, fullgraph=True)
        self._mode, self._log_line, self._parameters = mode, log_line, parameters
        self._spent, self._size = _seconds_spent(), ""

    def __call__(self, batch: Any) -> Tensor:
        spent = _seconds_spent()
        if spent > self._spent and self._size:
            self._log_line(f"compiled for images of {self._size} in {spent - self._spent:.0f} s")
        self._spent, self._size = spent, "x".join(map(str, batch.images.shape[2:]))
        if self._mode == CUDA_GRAPHS:
            self._begin_graphs()
        return self._to_input(batch)

    def _begin_graphs(self) -> None:
        """Copy the gradients that the step has so far; let the graphs use their memory again.

        Without the mark torch takes each of the three graphs for the start of a new micro-batch.
        """
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        torch.compiler.cudagraph_mark_step_begin()


def _seconds_spent() -> float:
    """Seconds that this process has spent on compiling."""
    from torch._dynamo.utils import calculate_time_spent

    return calculate_time_spent()["total_wall_time"]
