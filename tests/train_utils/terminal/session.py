"""What a training of three epochs shows, without the training; test_terminal.py runs it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from train_utils.run.log import RunLog
from train_utils.terminal import progress as bars
from train_utils.terminal.epochs import EpochTable
from train_utils.terminal.progress import Progress

LOSSES = {"loss": 12.3456, "loss_box": 0.00123456, "loss_objectness": 123456.7, "loss_classification": 4.5}
RATES = {"images_per_second": 214.4, "waiting": 0.125, "memory": "1.2G"}
SAID = "train: " + "many images and " * 12 + "boxes"
FIGURES = "figures:\n  a row of a table that is longer than any of the terminals is wide:" + " one line" * 8


def main(folder: Path, end: str) -> None:
    """Two epochs, then part of the third: ``end`` is close, fail or kill."""
    bars.SECONDS_BETWEEN_UPDATES = -1.0
    log = RunLog(folder, is_main=True)
    table = EpochTable(log.line)
    log.line(SAID)
    for epoch in (1, 2, 3):
        with Progress(40, f"epoch {epoch}/3", True, lines=2, left=lambda progress: 100 - progress.done) as progress:
            for done in (10, 20, 30, 40):
                progress.at(done, lambda: {"loss": "12.35", "wait": "12%"})
                if epoch == 3 and done == 20:
                    log.line("rank 0: a note in the middle of an epoch")
                    if end == "fail":
                        raise ValueError("broken")
                    if end == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
        with Progress(10, "evaluate", True, 2) as evaluation:
            evaluation.advance(10)
        figures = {"AP": -1.0 if epoch == 1 else 0.5 / epoch, "AP50": 0.5, "AP75": 0.25, "seconds": 5.0, "left": 9.0}
        counts = {"epoch": f"{epoch}/3", "step": str(4 * epoch)}
        row: dict[str, Any] = {**counts, **LOSSES, **RATES, **figures}
        table.add(row, is_best=epoch == 2)
    log.line(FIGURES)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
