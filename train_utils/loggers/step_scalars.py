"""The losses each few steps, read without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from train_utils.run.run_state import LOSS_NAMES, RunState

Report = Callable[[int, dict[str, float]], None]


class StepScalars:
    """Reports mean losses of this rank since the last report; for one epoch.

    ``state.loss_sums`` is copied to the host beside the work of the device. The copy is read one
    step later: by then the step's own wait for the device (is the loss finite?) has passed it.
    """

    def __init__(self, state: RunState, every: int, report: Report) -> None:
        """Report after each multiple of ``every`` steps of the run; 0: never."""
        self._state, self._every, self._report = state, every, report
        self._sums, self._steps = self._copy(), state.loss_steps
        self._waiting: tuple[int, float, Tensor, int] | None = None

    def after_step(self, lr: float) -> None:
        """Note the sums of a step that just ended, and report those noted before."""
        self.report()
        if self._every > 0 and self._state.step % self._every == 0:
            self._waiting = (self._state.step, lr, self._copy(), self._state.loss_steps)

    def report(self) -> None:
        """Report what was noted; call it only if the device has been waited for since."""
        if self._waiting is None:
            return
        step, lr, sums, steps = self._waiting
        if steps > self._steps:  # else every step was skipped, or the run was rolled back
            means = ((sums - self._sums) / (steps - self._steps)).tolist()
            self._report(step, {"lr": lr, **dict(zip(LOSS_NAMES, means, strict=True))})
        self._sums, self._steps, self._waiting = sums, steps, None

    def _copy(self) -> Tensor:
        return self._state.loss_sums.to("cpu", non_blocking=True, copy=True)  # into pinned memory
