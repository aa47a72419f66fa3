"""The Optuna study of scripts/tune.py: its file, its search space, its pictures."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import IntervalSweep, Override

from conf.failures import ConfigError
from conf.schema_tools import TuneConfig
from conf.sweeps.space import values_of

if TYPE_CHECKING:
    import optuna

MOST_NAMED = 10  # lines that a legend names


def open_study(config: TuneConfig, path: Path) -> optuna.Study:
    """Open or create the study in the SQLite file ``path``; trials that were stopped wait to go on.

    Raises ConfigError without Optuna.
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
    """The values of an option to search, as Optuna has them.

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
    """Draw the APs of the trials in turn, over each option and over epochs; return the files."""
    import matplotlib
    import optuna

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullFormatter
    from optuna.visualization import matplotlib as plots

    if len(study.get_trials(states=[optuna.trial.TrialState.COMPLETE])) < 2:
        return []
    drawings: dict[str, tuple[str, str | None, Any]] = {
        "trials": ("AP of each trial", "trial", plots.plot_optimization_history),
        "options": ("AP over each option", None, plots.plot_slice),
        "epochs": ("AP of each trial after each epoch", "epoch", plots.plot_intermediate_values),
    }
    for name, (title, below, draw) in drawings.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            draw(study)
        figure = plt.gcf()
        for axis in figure.axes:
            axis.set_title("")
            axis.xaxis.set_minor_formatter(NullFormatter())  # those of a log scale overlap
            if below is not None:
                axis.set(xlabel=below, ylabel="AP")
            if len(axis.lines) > MOST_NAMED and (legend := axis.get_legend()) is not None:
                legend.remove()
        figure.suptitle(title)
        if below is None:
            figure.axes[0].set_ylabel("AP")
            figure.set_size_inches(max(6.4, 2.6 * len(figure.axes)), 4.8)
        figure.savefig(folder / f"{name}.png", dpi=110, bbox_inches="tight")
        plt.close(figure)
    return [folder / f"{name}.png" for name in drawings]
