"""TensorBoard: event files in ``tensorboard/`` of the run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import cv2
import yaml

from train_utils.loggers.interface import Cell, LoggedRun

FLUSH_SECONDS = 10  # a kill loses at most the figures of this time


class TensorBoardLogger:
    """Writes event files; of a resumed run, TensorBoard drops what was logged after its step."""

    def __init__(self, run: LoggedRun, config: object) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(run.folder / "tensorboard", purge_step=run.step + 1, flush_secs=FLUSH_SECONDS)
        self._writer.add_text("configuration", f"```\n{yaml.safe_dump(run.options, sort_keys=False)}```", run.step)

    def scalars(self, step: int, group: str, figures: Mapping[str, float]) -> None:
        """Add a point to each curve ``<group>/<name>``."""
        for name, figure in figures.items():
            self._writer.add_scalar(f"{group}/{name}", figure, step)

    def picture(self, step: int, name: str, path: Path) -> None:
        """Add a picture."""
        self._writer.add_image(name, cv2.imread(str(path), cv2.IMREAD_COLOR_RGB), step, dataformats="HWC")

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Add a table as text in Markdown."""
        cells = ([f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows)
        lines = [columns, ["---"] * len(columns), *cells]
        self._writer.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in lines), step)

    def close(self, complete: bool) -> None:
        """Write the events that still wait."""
        self._writer.close()
