"""Options of the loggers. YAML holds every value; fields have no defaults. Imports no torch."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from enum import StrEnum

from train_utils.errors import TrainError

MODULES = {  # what must be importable for logger=<name>; extras of the same names install it
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}


@dataclass
class TensorBoardConfig:
    """Event files in ``tensorboard/`` of the run folder (keys ``logger.tensorboard.*``)."""

    flush_seconds: int  # a kill loses at most the figures of this time


class WandbMode(StrEnum):
    """``offline`` writes into the run folder only; ``wandb sync`` uploads that later."""

    online = "online"
    offline = "offline"


@dataclass
class WandbConfig:
    """A run in Weights & Biases (keys ``logger.wandb.*``)."""

    project: str
    entity: str | None  # team or user; null: that of the login
    name: str | None  # null: that of the run folder
    group: str | None  # runs that the page shows together, such as the seeds of one setting
    mode: WandbMode  # online, or offline for a later `wandb sync`


@dataclass
class MlflowConfig:
    """A run in MLflow (keys ``logger.mlflow.*``)."""

    uri: str | None  # server or store; null: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db here
    experiment: str
    name: str | None  # null: that of the run folder


@dataclass
class LoggerConfig:
    """What a run shows, draws and logs, and to which services (keys ``logger.*``)."""

    lines_per_epoch: int  # progress lines per epoch if the output is not a terminal
    pictures: bool  # draw the first training batch, the curves and detections into the run folder
    every_steps: int  # steps between the losses in steps.csv and in the services; 0: none but each epoch's
    tensorboard: TensorBoardConfig | None
    wandb: WandbConfig | None
    mlflow: MlflowConfig | None

    def __post_init__(self) -> None:
        if self.every_steps < 0:
            raise ValueError(f"logger.every_steps must be 0 or more, got {self.every_steps}")
        for name in self.services:
            if not all(map(is_installed, MODULES[name])):
                raise TrainError(f"logger={name} is not installed. fix: uv sync --extra {name}, or leave {name} out")

    @property
    def services(self) -> list[str]:
        """The chosen loggers besides CSV, by name."""
        return [name for name in MODULES if getattr(self, name) is not None]


def is_installed(module: str) -> bool:
    """Whether a module can be imported; a folder ``wandb/`` that a run left here is none."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None
