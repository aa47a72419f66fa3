"""The checkpoints of a running training: save the state, or go back to the last one."""

from __future__ import annotations

from collections.abc import Callable

from train_utils.distributed import barrier
from train_utils.run.checkpoint_writer import CheckpointWriter
from train_utils.run.run_folder import RunFolder
from train_utils.run.run_state import RunState, read_run


class Checkpoints:
    """The checkpoints of ``state`` in ``folder``; ``say`` gets lines about failed writes."""

    def __init__(self, folder: RunFolder, state: RunState, say: Callable[[str], None]) -> None:
        self.writer = CheckpointWriter(say)
        self._folder, self._state = folder, state

    def save(self, is_best: bool = False, best_only: bool = False) -> None:
        """Queue checkpoints for writing; raise TrainError if another run took the folder over."""
        self._folder.check()
        self._state.save(self.writer, self._folder.path, is_best, best_only)

    def roll_back(self) -> str:
        """Restore weights and optimiser from the last checkpoint; return a line for the log."""
        self.writer.wait()
        barrier()
        self._state.restore_weights(read_run(self._folder.path)[0])
        return "weights and optimiser are those of the last checkpoint again; training goes on with other images"
