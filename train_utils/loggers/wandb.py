"""Weights & Biases: online, or with WANDB_MODE=offline in ``wandb/`` of the run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from train_utils.loggers.config import WandbConfig
from train_utils.loggers.interface import Cell, LoggedRun

FINISH_SECONDS = 15  # for what the service has not taken yet; the rest stays on the disk


class WandbLogger:
    """Logs into one run of the service, which has the id of the run."""

    def __init__(self, run: LoggedRun, config: WandbConfig) -> None:
        """Open the run. Raises wandb's errors without a login or a connection."""
        import wandb

        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise wandb.errors.UsageError("no login here: wandb login, or WANDB_MODE=offline")
        self._wandb = wandb
        self._run = wandb.init(
            project=config.project,
            name=run.folder.name,
            id=run.run_id,
            resume="allow",
            config=run.options,
            allow_val_change=True,
            dir=run.folder,
            reinit="create_new",  # a sweep trains several runs in one process
            settings=wandb.Settings(
                console="off", silent=True, finish_timeout=FINISH_SECONDS, finish_timeout_raises=False
            ),
        )
        # Its own count of calls cannot go back, but a resumed run repeats steps.
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, group: str, figures: Mapping[str, float]) -> None:
        """Add a point to each curve ``<group>/<name>`` over ``step``."""
        self._run.log({"step": step, **{f"{group}/{name}": figure for name, figure in figures.items()}})

    def picture(self, step: int, name: str, path: Path) -> None:
        """Upload a picture."""
        self._run.log({"step": step, name: self._wandb.Image(str(path))})

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Upload a table."""
        data = [list(row) for row in rows]
        self._run.log({"step": step, name: self._wandb.Table(columns=list(columns), data=data)})

    def close(self, complete: bool) -> None:
        """Wait for the uploads; the service shows a run that is not ``complete`` as failed."""
        self._run.finish(exit_code=0 if complete else 1)
