"""A step whose loss or gradient is not finite: undone in the model, kept on disk for a look."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from train_utils.distributed import World, max_over_ranks
from train_utils.errors import TrainError
from train_utils.optim import pairs_by_dtype

MAX_DUMPS = 5  # steps of one run whose batches are kept
FOLDER = "nonfinite"
HELP = "a lower optim.lr, a longer optim.burn_in_epochs, optim.clip_norm=10, or train.precision=float32"


class NonFiniteGuard:
    """Undoes what a bad step did to batch-norm statistics, keeps its batch, and limits bad steps.

    ``folder`` is the run folder. ``limit`` steps in a row may be skipped (0: none). After that
    ``roll_back`` restores the last checkpoint and returns a line for the log; without it, or if it
    does not help, the guard raises TrainError. ``say`` gets lines for the log, and ``file_name``
    names an image by its position in the data set.
    """

    def __init__(
        self,
        world: World,
        folder: Path | None,
        limit: int,
        say: Callable[[str], None],
        file_name: Callable[[int], str] = str,
        roll_back: Callable[[], str] | None = None,
    ) -> None:
        self.in_a_row = 0  # steps skipped; the caller sets it to 0 after a good step
        self._world, self._folder, self._limit, self._say = world, folder, limit, say
        self._file_name, self._roll_back = file_name, roll_back
        self._dumps = 0
        self._rolled_back_at: int | None = None
        self._buffers: list[tuple[list[Tensor], list[Tensor]]] = []  # (copies before the step, of the model)
        self._told_overflow = False

    def begin_step(self, model: nn.Module) -> None:
        """Copy the buffers of the plain model, always the same one, before the step."""
        if not self._buffers:
            buffers = list(model.buffers())
            self._buffers = pairs_by_dtype([buffer.clone() for buffer in buffers], buffers)
        for before, now in self._buffers:
            torch._foreach_copy_(before, now)

    def skip(
        self,
        model: nn.Module,
        step: int,
        batches: Sequence[Any],
        losses: dict[str, float],
        forward: Callable[[Any], object],
    ) -> None:
        """Undo step ``step`` (from 0) in the plain model's buffers and record it.

        All ranks call this together. ``forward`` runs the network on a batch, to find the first
        layer that is not finite. Raises TrainError after more than ``limit`` such steps in a row.
        """
        layer = None
        if self._dumps < MAX_DUMPS:
            self._dumps += 1
            layer = first_nonfinite_layer(model, batches, forward)
            self._dump(model, step, batches, losses, layer)
        self._undo()
        self.in_a_row += 1
        named = ", ".join(f"{name} {value:.4g}" for name, value in losses.items())
        where = f", first in {layer}" if layer is not None else ""
        kept = f"; its batch is in {self._folder / FOLDER}" if self._folder is not None else ""
        self._say(f"step {step}: loss or gradient is not finite ({named}{where}): update skipped{kept}")
        if self.in_a_row <= self._limit:
            return
        if self._roll_back is None or self._rolled_back_at == step - self.in_a_row:
            again = "" if self._roll_back is None else ", again right after a return to the last checkpoint"
            raise TrainError(
                f"loss or gradient is no longer finite at step {step}{self._culprits(losses)} ({named}), "
                f"{self.in_a_row} step(s) in a row{again}. fix: {HELP}"
            )
        self.in_a_row, self._rolled_back_at = 0, step
        self._say(self._roll_back())

    def overflow(self, step: int, scale: float) -> None:
        """Undo step ``step`` (from 0), whose gradients overflowed at float16's loss ``scale``.

        The scale has been lowered already. This is logged once and never counted.
        """
        self._undo()
        if not self._told_overflow:
            self._say(
                f"step {step}: a gradient overflows at a loss scale of {scale:g}: update skipped, the scale falls. "
                "float16 does this in its first steps and sometimes later; it counts once the scale is at 1"
            )
        self._told_overflow = True

    @torch.no_grad()
    def _undo(self) -> None:
        for before, now in self._buffers:
            torch._foreach_copy_(now, before)

    def _culprits(self, losses: dict[str, float]) -> str:
        """The ranks whose own losses are not finite; all ranks call this together."""
        rank, world_size = self._world.rank, self._world.world_size
        if world_size == 1:
            return ""
        bad = not all(map(math.isfinite, losses.values()))
        flags = max_over_ranks([int(bad and number == rank) for number in range(world_size)])
        ranks = ", ".join(str(number) for number in range(world_size) if flags[number])
        return f" on rank {ranks}; losses of rank {rank}" if ranks else f" (a gradient of all); losses of rank {rank}"

    def _dump(
        self, model: nn.Module, step: int, batches: Sequence[Any], losses: dict[str, float], layer: str | None
    ) -> None:
        """Write this rank's batches and what may explain them, as plain data for torch.load."""
        if self._folder is None:
            return
        norms = {
            name: float(torch.linalg.vector_norm(parameter.grad.double()))
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        content = {
            "step": step,
            "losses": losses,
            "layer": layer,
            "gradient_norms": norms,
            "images": [batch.images.cpu() for batch in batches],
            "targets": [batch.targets.cpu() for batch in batches],
            "files": [[self._file_name(index) for index in batch.indices.tolist()] for batch in batches],
        }
        path = self._folder / FOLDER / f"step_{step:08d}_rank_{self._world.rank}.pt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(content, path)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            self._say(f"cannot write {path} ({str(error).splitlines()[0]}): the batch is not kept")


@torch.no_grad()
def first_nonfinite_layer(model: nn.Module, batches: Sequence[Any], forward: Callable[[Any], object]) -> str | None:
    """The first module whose output is not finite in a forward pass; None if all outputs are.

    All batches are run in any case, because synchronised batch norms need every rank.
    """
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point() and not output.isfinite().all():
                found.append(name)

        return hook

    leaves = [(name, module) for name, module in model.named_modules() if not list(module.children())]
    handles = [module.register_forward_hook(watch(name)) for name, module in leaves]
    try:
        for batch in batches:
            forward(batch)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None
