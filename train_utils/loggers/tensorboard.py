"""TensorBoard: event files in ``tensorboard/`` of the run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import cv2
import yaml

from train_utils.loggers.config import TensorBoardConfig
from train_utils.loggers.interface import Cell, LoggedRun, markdown


class TensorBoardLogger:
    """Writes event files; of a resumed run, TensorBoard drops what was logged after its step."""

    def __init__(self, run: LoggedRun, config: TensorBoardConfig) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = str(run.folder / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=run.step + 1, flush_secs=config.flush_seconds)
        options = yaml.safe_dump(run.options, sort_keys=False)
        self._writer.add_text("configuration", f"```\n{options}```", run.step)

    def scalars(self, step: int, group: str, figures: Mapping[str, float]) -> None:
        """Add a point to each curve ``<group>/<name>``."""
        for name, figure in figures.items():
            self._writer.add_scalar(f"{group}/{name}", figure, step)

    def picture(self, step: int, name: str, path: Path) -> None:
        """Add a picture. Raises OSError if there is none in ``path``."""
        image = cv2.imread(str(path))
        if image is None:
            raise OSError(f"{path} is no picture")
        self._writer.add_image(name, image[:, :, ::-1].copy(), step, dataformats="HWC")

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Add a table as text."""
        self._writer.add_text(name, markdown(columns, rows), step)

    def close(self, complete: bool) -> None:
        """Write the events that still wait."""
        self._writer.close()
