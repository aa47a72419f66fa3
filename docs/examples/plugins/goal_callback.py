"""A callback: writes a file once the AP reaches a goal, for example for a script that waits.

``python train.py plugins=[goal_callback.py] plugin.goal.AP=0.4``
"""

from dataclasses import dataclass

from plugins import callback
from train_utils.callbacks.callbacks import Moment


@dataclass
class Goal:
    """What to wait for."""

    AP: float = 0.5  # of the validation set, 0..1

    def __post_init__(self) -> None:
        if not 0 <= self.AP <= 1:
            raise ValueError(f"AP must lie in 0..1, got {self.AP}")


@callback("goal", Goal)
class GoalReached:
    """Methods are named after moments: run_start, step, epoch, evaluation, checkpoint, end."""

    def __init__(self, options: Goal) -> None:
        self._goal = options.AP

    def evaluation(self, moment: Moment) -> None:
        """After an evaluation; figures are those of COCO, on rank 0."""
        if moment.figures["AP"] >= self._goal:
            (moment.folder / "goal_reached.txt").write_text(f"AP {moment.figures['AP']:.3f} in epoch {moment.epoch}\n")
