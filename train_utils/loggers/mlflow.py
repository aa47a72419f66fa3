"""MLflow: a server, or a store in a database file."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from train_utils.loggers.config import MlflowConfig
from train_utils.loggers.interface import Cell, LoggedRun, markdown
from train_utils.loggers.service_ids import read_id, write_id

MOST_PARAMS, LONGEST_PARAM = 100, 6000  # of one request, and in characters: the service's limits


class MlflowLogger:
    """Logs into one run of the store, whose id the run folder keeps."""

    def __init__(self, run: LoggedRun, config: MlflowConfig) -> None:
        """Open the run. Raises MLflow's errors if the store does not answer or lost the run."""
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(tracking_uri=config.uri), Metric
        own_id = read_id(run.folder, "mlflow")
        if own_id is None:
            known = self._client.get_experiment_by_name(config.experiment)
            experiment = known.experiment_id if known else self._client.create_experiment(config.experiment)
            created = self._client.create_run(experiment, run_name=config.name or run.folder.name)
            own_id = write_id(run.folder, "mlflow", created.info.run_id)
            params = [Param(key, str(value)[:LONGEST_PARAM]) for key, value in flat(run.options)]
            for i in range(0, len(params), MOST_PARAMS):
                self._client.log_batch(own_id, params=params[i : i + MOST_PARAMS])
        else:
            self._client.update_run(own_id, status="RUNNING")
        self._id = own_id
        self._client.log_dict(own_id, run.options, "config.yaml")  # params of a run cannot change

    def scalars(self, step: int, group: str, figures: Mapping[str, float]) -> None:
        """Add a point to each curve ``<group>/<name>``."""
        now = int(time.time() * 1000)
        metrics = [self._metric(f"{group}/{name}", figure, now, step) for name, figure in figures.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def picture(self, step: int, name: str, path: Path) -> None:
        """Keep a picture as an artifact."""
        self._client.log_artifact(self._id, str(path), str(Path("pictures", name).parent))

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Keep a table as an artifact in Markdown."""
        self._client.log_text(self._id, markdown(columns, rows), f"{name}.md")

    def close(self, complete: bool) -> None:
        """End the run; one that is not ``complete`` counts as killed."""
        self._client.set_terminated(self._id, "FINISHED" if complete else "KILLED")


def flat(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The options with their full keys."""
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
