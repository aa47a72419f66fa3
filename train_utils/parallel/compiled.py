"""torch.compile for a training step: the batch's floats, the network and the loss, a graph each.

Sizes are static, so each image size of a multi-scale training has its graphs. Under DDP torch
splits the network's graph where DDP's buckets end, and the exchange of one bucket overlaps with the
rest of the backward pass. The module itself is not replaced: state dicts keep their names, and
copies of it, such as the weight average, are not compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train_utils.distributed import sum_over_ranks
from train_utils.loop.interfaces import Loss, LossParts, SumOverRanks

TARGET_ROWS = 256  # targets are filled up to multiples of this, for few graphs of the loss
GRAPHS_OF_A_SIZE = 16  # at most: one for each multiple


def compile_step(
    network: nn.Module, loss: Loss, to_input: Callable[[Any], Tensor], mode: str, sizes: int, say: Callable[[str], None]
) -> tuple[Loss, Callable[[Any], Tensor]]:
    """Compile ``network`` in place; return ``loss`` and ``to_input`` compiled, too.

    ``mode`` is one of torch.compile, and ``sizes`` the number of image sizes. Each is compiled in
    its first step. ``say`` then gets a line with the seconds.
    """
    import torch._dynamo  # slow

    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, sizes * GRAPHS_OF_A_SIZE)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, sizes * GRAPHS_OF_A_SIZE)
    network.compile(mode=mode, dynamic=False)
    return _CompiledLoss(loss, mode), _CompiledInput(to_input, mode, say)


def is_compiled(network: nn.Module) -> bool:
    """Whether the network, or one that it wraps, is compiled."""
    return any(module._compiled_call_impl is not None for module in network.modules())


def eagerly(network: nn.Module) -> AbstractContextManager[None]:
    """A context in which a compiled network runs as if it were not, e.g. with hooks in it."""
    return torch.compiler.set_stance("force_eager") if is_compiled(network) else nullcontext()


class _CompiledLoss:
    """A loss on targets filled up with rows of zeros, which count for nothing."""

    def __init__(self, loss: Loss, mode: str) -> None:
        def parts(maps: list[Tensor], targets: Tensor, ratio: Any, world_size: int) -> LossParts:
            # Without a clock around it, which could not be compiled.
            return loss(maps, targets, objectness_ratio=ratio, sum_over_ranks=sum_over_ranks, world_size=world_size)

        self._eager, self._kept = loss, False
        self._parts = torch.compile(parts, mode=mode, dynamic=False, fullgraph=True)

    def __call__(
        self,
        raw_maps: Sequence[Tensor],
        targets: Tensor,
        *,
        objectness_ratio: float,
        sum_over_ranks: SumOverRanks,
        world_size: int,
    ) -> LossParts:
        """The parts of the loss; the exchange between ranks lies in its graph."""
        if not self._kept:  # what a loss keeps for a device, such as its anchors, is to be no part of its graph
            with torch.no_grad():
                self._eager(raw_maps, targets, objectness_ratio=1.0, sum_over_ranks=lambda tensor: tensor, world_size=1)
            self._kept = True
        missing = max(len(targets), 1) + -max(len(targets), 1) % TARGET_ROWS - len(targets)
        # A number would be a constant of the graph, and each step of the burn-in has another.
        ratio = torch.full((), objectness_ratio, device=targets.device)
        return self._parts(list(raw_maps), F.pad(targets, (0, 0, 0, missing)), ratio, world_size)


class _CompiledInput:
    """The compiled ``to_input``, called first in a step: it tells what the last one cost."""

    def __init__(self, to_input: Callable[[Any], Tensor], mode: str, say: Callable[[str], None]) -> None:
        self._to_input = torch.compile(to_input, mode=mode, dynamic=False, fullgraph=True)
        self._say = say
        self._spent, self._size = _seconds_spent(), ""

    def __call__(self, batch: Any) -> Tensor:
        spent = _seconds_spent()
        if spent > self._spent and self._size:
            self._say(f"compiled for images of {self._size} in {spent - self._spent:.0f} s")
        self._spent, self._size = spent, "x".join(map(str, batch.images.shape[2:]))
        return self._to_input(batch)


def _seconds_spent() -> float:
    """Seconds that this process has spent on compiling."""
    from torch._dynamo.utils import calculate_time_spent

    return calculate_time_spent()["total_wall_time"]
