"""torch.compile for a training step: the batch's floats, the network and the loss, a graph each.

Each image size has its graphs. The module is not replaced: state dicts keep their names, and copies
are not compiled.
"""

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from conf.cli import launch, run_files
from data import Batch
from data.progress import LogLine, log
from models.loss import HeadLoss, LossParts

INPUT_ONLY = "input"  # colours are a dozen kernels; as one they save a GPU some milliseconds a batch
TARGET_ROWS = 256  # targets are filled up to multiples of this, for few graphs of the loss
ToInput = Callable[[Batch], Tensor]


def compile_step(
    network: torch.nn.Module, loss: HeadLoss, to_input: ToInput, mode: str, sizes: int, *, log_line: LogLine = log.info
) -> tuple["HeadLoss | CompiledLoss", ToInput]:
    """Compile ``network`` in place, for ``sizes`` image sizes; return loss and input compiled."""
    launch.keep_compiled(run_files.weights_folder() / "compiled")
    if mode == INPUT_ONLY:
        return loss, torch.compile(to_input, dynamic=True, fullgraph=True)
    from torch._dynamo import config as limits  # slow

    graphs = sizes * 16  # at most: one for each multiple of TARGET_ROWS
    limits.recompile_limit = max(limits.recompile_limit, graphs)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, graphs)
    network.compile(dynamic=False)
    compiled_input = torch.compile(to_input, dynamic=False, fullgraph=True)
    began: list[float] = []  # the first two micro-batches

    def begin_micro_batch(batch: Batch) -> Tensor:
        if len(began) < 2:
            began.append(time.perf_counter())
            waited = f"compiled: the first step took {began[-1] - began[0]:.0f} s"
            log_line(waited if len(began) == 2 else "compiling, about a minute, once for each image size")
        return compiled_input(batch)

    return CompiledLoss(loss), begin_micro_batch


class CompiledLoss:
    """A loss on targets filled up with rows of zeros, which count for nothing."""

    def __init__(self, loss: HeadLoss) -> None:
        self._eager, self._is_prepared = loss, False
        self._sums = torch.compile(loss.sums, dynamic=False, fullgraph=True)

    def count_positives(self, targets: Tensor) -> Tensor:
        """As the loss that is compiled."""
        return self._eager.count_positives(targets)

    def sums(
        self,
        raw_maps: Sequence[Tensor],
        targets: Tensor,
        positives_per_image: Tensor,
        objectness_ratio: float,
        refines: bool = False,
    ) -> tuple[LossParts, Tensor]:
        """As the loss that is compiled, with a graph for each value of ``refines``."""
        if not self._is_prepared:  # what a loss caches, such as anchors, must not enter its graph
            with torch.no_grad():
                self._eager.sums(raw_maps, targets, positives_per_image)
            self._is_prepared = True
        # A number would be a constant of the graph, and each step of the warm-up has another.
        ratio = torch.full((), objectness_ratio, device=targets.device)
        rows = max(1, math.ceil(len(targets) / TARGET_ROWS)) * TARGET_ROWS
        filled = torch.nn.functional.pad(targets, (0, 0, 0, rows - len(targets)))
        return self._sums(list(raw_maps), filled, positives_per_image, ratio, refines)
