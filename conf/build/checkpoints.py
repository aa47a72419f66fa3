"""The checkpoints of a running training: what they hold, saving them, going back to the last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conf.build.network import describe_network
from conf.entry import to_dictionary
from conf.schema import TrainConfig
from data import Annotations
from models import WEIGHTS_VERSION, Darknet
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


def describe(
    config: TrainConfig, model: Darknet, train_set: Annotations, micro_batch: int, steps_per_epoch: int
) -> dict[str, Any]:
    """Everything that a checkpoint needs, besides its values, to be used on its own."""
    return {
        "network": describe_network(model, config.model),
        "names": list(train_set.names),
        "category_ids": train_set.category_ids.tolist(),
        "config": to_dictionary(config),
        "weights_version": list(WEIGHTS_VERSION),
        "heads_kept": model.heads_kept,
        "micro_batch": micro_batch,
        "steps_per_epoch": steps_per_epoch,
        "data": {"images": len(train_set), "boxes": len(train_set.classes), "digest": train_set.digest()},
    }
