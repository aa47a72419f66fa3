"""The Optuna study of scripts/tune.py: its file, its search space, its pictures."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import IntervalSweep, Override

from conf.failures import ConfigError
from conf.schema_tools import TuneConfig
from conf.sweeps.space import values_of

if TYPE_CHECKING:
    import optuna


def open_study(config: TuneConfig, path: Path) -> optuna.Study:
    """Open or create the study in the SQLite file ``path``; stopped trials wait to be resumed.

    Raises ConfigError if Optuna is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise ConfigError("scripts.tune needs Optuna, which is not installed. fix: uv sync --extra tune") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path.parent.mkdir(parents=True, exist_ok=True)
    storage = optuna.storages.RDBStorage(f"sqlite:///{path.absolute()}")
    study = optuna.create_study(
        storage=storage,
        study_name=path.parent.name,
        direction="maximize",
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(config.startup_trials, n_warmup_steps=config.prune_after),
    )
    study.sampler = optuna.samplers.TPESampler(
        n_startup_trials=config.startup_trials,
        seed=config.seed + len(study.trials),  # after a stop the same seed would draw the same again
    )
    for trial in study.get_trials(states=[optuna.trial.TrialState.RUNNING]):
        storage.set_trial_state_values(trial._trial_id, optuna.trial.TrialState.WAITING)
    return study


def distribution(sweep: Override) -> optuna.distributions.BaseDistribution:
    """The values of an option to search, as a distribution of Optuna.

    Raises ConfigError for an interval that Optuna refuses.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = sweep.value()
    if not isinstance(value, IntervalSweep):
        return CategoricalDistribution(values_of(sweep))
    assert value.start is not None and value.end is not None
    log = "log" in value.tags
    try:
        if isinstance(value.start, int):
            return IntDistribution(value.start, int(value.end), log=log)
        return FloatDistribution(value.start, value.end, log=log)
    except ValueError as error:
        raise ConfigError(f"{sweep.input_line} is no interval ({error}). fix: the lower end first") from error


def draw_study(study: optuna.Study, folder: Path) -> list[Path]:
    """Draw the APs by trial, against each option and by epoch; return the files.

    Nothing is drawn before a trial has trained to its end.
    """
    if not any(trial.state.name == "COMPLETE" for trial in study.trials):
        return []
    import matplotlib

    matplotlib.use("Agg")
    import numpy as np
    from matplotlib import pyplot as plt
    from optuna.visualization import matplotlib as drawings

    drawn: dict[str, Callable[[optuna.Study], Any]] = {
        "trials": partial(drawings.plot_optimization_history, target_name="AP"),
        "options": partial(drawings.plot_slice, target_name="AP"),
        "epochs": drawings.plot_intermediate_values,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna calls them experimental
        for name, draw in drawn.items():
            axis = np.ravel(draw(study))[0]
            if name == "epochs":
                axis.set(title="AP of each trial by epoch", xlabel="epoch", ylabel="AP")
            axis.figure.savefig(folder / f"{name}.png", dpi=110, bbox_inches="tight")
            plt.close(axis.figure)
    return [folder / f"{name}.png" for name in drawn]
