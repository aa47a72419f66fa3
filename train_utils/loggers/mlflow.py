"""MLflow: a server, or a store in a database file."""

from __future__ import annotations

import csv
import io
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from train_utils.loggers.config import MlflowConfig
from train_utils.loggers.interface import Cell, LoggedRun
from train_utils.run.options import flat

LONGEST_PARAM = 6000  # characters, the service's limit


class MlflowLogger:
    """Logs into one run of the store, which has the run's id as the tag ``own_id``."""

    def __init__(self, run: LoggedRun, config: MlflowConfig) -> None:
        """Open the run. Raises MLflow's errors if the store does not answer."""
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(), Metric
        known = self._client.get_experiment_by_name(config.experiment)
        experiment = known.experiment_id if known else self._client.create_experiment(config.experiment)
        found = self._client.search_runs([experiment], f"tags.own_id = '{run.run_id}'")
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {"own_id": run.run_id}
            self._id = self._client.create_run(experiment, run_name=run.folder.name, tags=tags).info.run_id
            params = [Param(key, str(value)[:LONGEST_PARAM]) for key, value in flat(run.options).items()]
            self._client.log_batch(self._id, params=params)
        self._client.log_dict(self._id, run.options, "config.yaml")  # params of a run cannot change

    def scalars(self, step: int, group: str, figures: Mapping[str, float]) -> None:
        """Add a point to each curve ``<group>/<name>``."""
        now = int(time.time() * 1000)
        metrics = [self._metric(f"{group}/{name}", figure, now, step) for name, figure in figures.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def picture(self, step: int, name: str, path: Path) -> None:
        """Keep a picture as an artifact."""
        self._client.log_artifact(self._id, str(path), str(Path("pictures", name).parent))

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Keep a table as an artifact in CSV."""
        text = io.StringIO()
        csv.writer(text).writerows([columns, *rows])
        self._client.log_text(self._id, text.getvalue(), f"{name}.csv")

    def close(self, complete: bool) -> None:
        """End the run; one that is not ``complete`` counts as killed."""
        self._client.set_terminated(self._id, "FINISHED" if complete else "KILLED")
