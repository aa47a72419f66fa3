"""Search for the best options of a training with Optuna; each trial is a run of train.py.

    python -m scripts.tune -- data=bccd train.epochs=30 'optim.lr=tag(log,interval(0.001,0.1))'
    python -m scripts.tune trials=50 name=tiny -- data=bccd model=yolov3-tiny,yolov4-tiny

Options of train.py follow ``--``; the search varies those with several values or an interval. The
study is runs/<name>/study.db, beside a run folder for each trial. After a stop the same command
continues it. Started several times, each with its own CUDA_VISIBLE_DEVICES, it shares the work.
"""

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.cli.program import start

    raise SystemExit(start("tune"))

import csv
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from conf import ConfigError, compose, options, schema
from conf.cli import run_files
from conf.cli.program import PROGRAMS
from conf.schema import require
from data.errors import as_started
from data.progress import log

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
Space = dict[str, Any]  # the values of each option, or Hydra's interval
FAILED = float("nan")  # which Optuna takes for a trial without a result
STOPPED = "stopped"  # an attribute of trials that Ctrl-C ended, which do not count as trials
SECONDS_BETWEEN_LOOKS = 1.0  # at metrics.csv of a trial


def tune(config: schema.TuneConfig) -> None:
    """Run the missing trials.

    Raises ConfigError for options that train.py refuses, or that differ from those of the study.
    """
    fixed = []
    space: Space = {}
    for each in OverridesParser.create().parse_overrides(config.options):
        if each.is_interval_sweep():
            space[each.get_key_element()] = each.value()
        elif each.is_sweep_override():
            space[each.get_key_element()] = list(each.sweep_string_iterator())
        else:
            fixed.append(str(each.input_line))
    if not space:
        raise ConfigError("nothing to search", "an option with several values or an interval behind --, see --help")
    first = {key: values[0] if isinstance(values, list) else values.start for key, values in space.items()}
    # A short name of a run would mean another one for the second trial.
    program = replace(PROGRAMS["train"], fill_in=lambda given, _: run_files.with_full_names(given, once=False))
    compose.compose("train", program.schema, [*fixed, *overrides(first)], program.complete)
    optuna = require("optuna", "scripts.tune")
    import sqlalchemy

    optuna.logging.set_verbosity(optuna.logging.ERROR)  # run_trial prints what happens
    folder = Path("runs", config.name)
    folder.mkdir(parents=True, exist_ok=True)
    storage = sqlalchemy.URL.create("sqlite", database=str(folder.absolute() / "study.db"))
    study = optuna.create_study(
        storage=storage.render_as_string(), study_name="trials", direction="maximize", load_if_exists=True
    )
    study.pruner = optuna.pruners.MedianPruner(n_warmup_steps=config.prune_after)
    asked, earlier = sorted(config.options), study.user_attrs.get("options", ["unknown options"])
    if study.trials and earlier != asked:
        raise ConfigError(f"the study {folder} searches with {shlex.join(earlier)}", "name=<a new one>")
    study.set_user_attr("options", asked)

    def objective(trial: Any) -> float:
        # Of the trial's own seed, so that processes that start together draw different points.
        seed = Random(f"{config.seed} {trial.number}").getrandbits(32)
        study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        return run_trial(trial, fixed, space, folder)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    while sum(STOPPED not in trial.user_attrs for trial in study.trials) < config.trials:  # also others'
        study.optimize(objective, n_trials=1)
    if study.get_trials(states=[optuna.trial.TrialState.COMPLETE]):
        best = shlex.join([*fixed, *overrides(study.best_params)])
        log.info(f"best AP {study.best_value:.4f}: {as_started('python train.py')} {best}")


def run_trial(trial: Any, fixed: list[str], space: Space, study_folder: Path) -> float:
    """Train once; return the best AP, or FAILED."""
    import optuna

    folder = study_folder / f"trial-{trial.number:04}"
    folder.mkdir()
    chosen = overrides({key: draw(trial, key, values) for key, values in space.items()})
    log.info(f"trial {trial.number}: {' '.join(chosen)} -> {folder}")
    command = [sys.executable, str(TRAIN), *fixed, *chosen, f"run_dir={options.quoted(str(folder))}"]
    with (folder / "terminal.txt").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    reported = 0
    try:
        while process.poll() is None:
            time.sleep(SECONDS_BETWEEN_LOOKS)
            for epoch, metric in list(scores_of(folder).items())[reported:]:
                trial.report(metric, epoch)
                reported += 1
            if reported and process.poll() is None and trial.should_prune():
                log.info(f"trial {trial.number}: pruned after epoch {epoch}")
                raise optuna.TrialPruned
    except KeyboardInterrupt:
        trial.set_user_attr(STOPPED, True)
        raise
    finally:
        process.send_signal(signal.SIGINT)  # its only one, as it has its own session: it saves a checkpoint
        process.wait()
    result = max(scores_of(folder).values(), default=FAILED) if process.returncode == 0 else FAILED
    log.info(f"trial {trial.number}: AP {result:.4f}, its output is in {folder / 'terminal.txt'}")
    return result


def overrides(values: dict[str, Any]) -> list[str]:
    """Values as options of train.py."""
    return [f"{key}={value}" for key, value in values.items()]


def draw(trial: Any, key: str, values: Any) -> Any:
    """The value of an option that Optuna suggests next."""
    if isinstance(values, list):
        return trial.suggest_categorical(key, values)
    suggest = trial.suggest_int if isinstance(values.start, int) else trial.suggest_float
    return suggest(key, *sorted((values.start, values.end)), log="log" in values.tags)


def scores_of(folder: Path) -> dict[int, float]:
    """The AP of each evaluated epoch of the run in ``folder``, from its metrics.csv."""
    path = folder / "metrics.csv"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())  # the last line may be half written
    return {int(row["epoch"]): float(row["AP"]) for row in rows if row.get("AP")}
