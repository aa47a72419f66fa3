"""The Optuna study of scripts/tune.py: its file, its search space, its pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.override_parser.types import IntervalSweep, Override

from conf.failures import ConfigError
from conf.schema_tools import TuneConfig
from conf.sweeps.space import values_of

if TYPE_CHECKING:
    import optuna


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
    """Draw the APs of the trials in turn, over each option and over epochs; return the files.

    In each picture the trials that trained to their end are blue, pruned ones grey and the best
    red. Nothing is drawn before two trials ended.
    """
    ended = [
        trial for trial in study.trials if trial.state.name in ("COMPLETE", "PRUNED") and trial.intermediate_values
    ]
    if not any(trial.state.name == "COMPLETE" for trial in ended) or len(ended) < 2:
        return []
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator, NullFormatter

    best = study.best_trial.number
    colours = [
        "tab:red" if trial.number == best else "tab:blue" if trial.state.name == "COMPLETE" else "silver"
        for trial in ended
    ]
    values = [trial.value if trial.value is not None else max(trial.intermediate_values.values()) for trial in ended]
    keys = sorted(set.intersection(*(set(trial.params) for trial in ended)))  # the space may have changed
    titles = {"trials": "AP of each trial", "options": "AP over each option", "epochs": "AP of each trial by epoch"}
    for name, title in titles.items():
        columns = keys if name == "options" else [{"trials": "trial", "epochs": "epoch"}[name]]
        size = (max(6.4, 2.8 * len(columns)), 4.8)
        figure, axes = plt.subplots(1, len(columns), sharey=True, squeeze=False, figsize=size, layout="constrained")
        for axis, key in zip(axes[0], columns, strict=True):
            axis.set_xlabel(key)
            if name == "epochs":
                for trial, colour in zip(ended, colours, strict=True):
                    steps, scores = zip(*sorted(trial.intermediate_values.items()), strict=True)
                    axis.plot(steps, scores, ".-", color=colour, zorder=2 + (colour == "tab:red"))
            else:
                across = [trial.number if name == "trials" else trial.params[key] for trial in ended]
                axis.scatter(across, values, c=colours)
            if name != "options":
                axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            elif isinstance(across[0], str):
                axis.tick_params("x", rotation=30)
            elif getattr(ended[0].distributions[key], "log", False):
                axis.set_xscale("log")
                axis.xaxis.set_minor_formatter(NullFormatter())  # its labels overlap
            axis.grid(alpha=0.3)
        axes[0][0].set_ylabel("AP")
        figure.suptitle(f"{title} (red: the best, grey: pruned)")
        figure.savefig(folder / f"{name}.png", dpi=110)
        plt.close(figure)
    return [folder / f"{name}.png" for name in titles]
