"""What a training of three epochs shows, without the training; test_terminal.py runs it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from train_utils.run.log import RunLog
from train_utils.terminal import progress as bars
from train_utils.terminal.epochs import EpochProgress, EpochTable
from train_utils.terminal.progress import Progress
from train_utils.terminal.time_left import TimeLeft

LOSSES = {"loss": 12.3456, "loss_box": 0.00123456, "loss_objectness": 123456.7, "loss_classification": 4.5}
RATES = {"images_per_second": 214.4, "waiting": 0.125}


def main(folder: Path, end: str) -> None:
    """Two epochs, then part of the third: ``end`` is close, fail or kill."""
    bars.SECONDS_BETWEEN_UPDATES = 0.0
    log = RunLog(folder, is_main=True)
    left = TimeLeft(3, (1, 2, 3), 0.5)
    table = EpochTable(3, left, log.line)
    log.line("train: " + "many images and " * 12 + "boxes")
    for epoch in (1, 2, 3):
        with EpochProgress(table, epoch, 0, 4, True, lines=2) as progress:
            for done in range(1, 5):
                if progress.due(done):
                    progress.show(done, step=4 * epoch + done - 4, **LOSSES, **RATES)
                if epoch == 3 and done == 2:
                    log.line("rank 0: a note in the middle of an epoch")
                    if end == "fail":
                        raise ValueError("broken")
                    if end == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
        left.trained(4.0, 4.0)
        with Progress(10, "evaluate", True, 2) as evaluation:
            evaluation.advance(10)
        left.evaluated(1.0)
        figures = {"AP": -1.0 if epoch == 1 else 0.5 / epoch, "AP50": 0.5, "AP75": 0.25, "seconds": 5.0}
        table.end_epoch(epoch, {"step": 4 * epoch, **LOSSES, **RATES, **figures}, is_best=epoch == 2)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
