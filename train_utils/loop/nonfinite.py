"""A step whose loss or gradient is not finite: undone in the model, and counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from train_utils.errors import TrainError
from train_utils.optim import pairs_by_dtype

HELP = "a lower optim.lr, a longer optim.burn_in_epochs, optim.clip_norm=10, or train.precision=float32"


class NonFiniteGuard:
    """Undoes what a bad step did to batch-norm statistics, and limits bad steps in a row.

    ``limit`` steps in a row may be skipped (0: none). ``say`` gets lines for the log.
    """

    def __init__(self, limit: int, say: Callable[[str], None]) -> None:
        self.in_a_row = 0  # steps skipped; the caller sets it to 0 after a good step
        self._limit, self._say = limit, say
        self._buffers: list[tuple[list[Tensor], list[Tensor]]] = []  # (copies before the step, of the model)
        self._told_overflow = False

    def begin_step(self, model: nn.Module) -> None:
        """Copy the buffers of the plain model, always the same one, before the step."""
        if not self._buffers:
            buffers = list(model.buffers())
            self._buffers = pairs_by_dtype([buffer.clone() for buffer in buffers], buffers)
        for before, now in self._buffers:
            torch._foreach_copy_(before, now)

    def skip(self, step: int, losses: Mapping[str, float]) -> None:
        """Undo step ``step`` (from 0) in the model's buffers; ``losses`` are those of this rank.

        All ranks call this together. Raises TrainError after more than ``limit`` such steps in a
        row.
        """
        self._undo()
        self.in_a_row += 1
        named = ", ".join(f"{name} {value:.4g}" for name, value in losses.items())
        self._say(f"step {step}: loss or gradient is not finite ({named}): update skipped")
        if self.in_a_row > self._limit:
            raise TrainError(
                f"loss or gradient is no longer finite at step {step} ({named}), {self.in_a_row} step(s) in a row. "
                f"fix: {HELP}"
            )

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
