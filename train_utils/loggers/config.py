"""Options of the loggers. YAML holds every value; fields have no defaults. Imports no torch."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from train_utils.errors import TrainError


@dataclass
class WandbConfig:
    """A run in Weights & Biases; WANDB_ENTITY, WANDB_MODE and so on hold, too."""

    project: str  # that the run belongs to


@dataclass
class MlflowConfig:
    """A run in MLflow, in the store that MLFLOW_TRACKING_URI names."""

    experiment: str  # that the run belongs to


@dataclass
class LoggerConfig:
    """What a run shows, draws and logs, and to which services (keys ``logger.*``)."""

    pictures: bool  # draw the first training batch, the curves and detections into the run folder
    every_steps: int  # steps between two rows of steps.csv, and points of the services; 0: none
    tensorboard: bool  # write event files into tensorboard/ of the run folder
    wandb: WandbConfig | None
    mlflow: MlflowConfig | None

    def __post_init__(self) -> None:
        if self.every_steps < 0:
            raise ValueError(f"logger.every_steps must be 0 or more, got {self.every_steps}")
        for name in self.services:
            if not is_installed(name):
                raise TrainError(f"logger={name} is not installed. fix: uv sync --extra {name}, or leave {name} out")

    @property
    def services(self) -> list[str]:
        """The chosen loggers besides CSV: names of modules, and of the extras that install them."""
        return [name for name in ("tensorboard", "wandb", "mlflow") if getattr(self, name)]


def is_installed(module: str) -> bool:
    """Whether a module can be imported; a folder ``wandb/`` that a run left here is none."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None
