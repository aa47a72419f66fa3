"""Search for the best options of a training with Optuna; each trial is a run of train.py.

    python -m scripts.tune space.optim.lr=log:1e-3:1e-1 -- data=bccd train.epochs=30
    python -m scripts.tune space=sgd trials=50 name=coco-sgd -- data=coco

The study is runs/<name>/study.db. The same command goes on with it after a stop. A trial that is
pruned or stopped ends as any training does, with a checkpoint.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.programs import run

    run("tune")
    raise SystemExit

import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.schema_tools import TuneConfig
from conf.sweeps.search import Search, shown
from conf.sweeps.space import arguments, parse_space
from conf.sweeps.study import FOLDER, draw_study, open_study
from conf.sweeps.table import write_table
from conf.sweeps.trials import check_trials

if TYPE_CHECKING:
    import optuna


def tune(config: TuneConfig) -> dict[str, float]:
    """Run the trials that are missing, then show all; return the best AP, {} without one.

    Raises ConfigError for options that train.py refuses.
    """
    check_trials(config.options, parse_space(config.space))
    folder = Path("runs", config.name)
    study = open_study(config, folder / "study.db")
    if study.trials:
        print(f"{len(study.trials)} trials so far in {folder / 'study.db'}", flush=True)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        Search(study, config, folder).run(found_devices() if config.devices == ["auto"] else config.devices)
    finally:
        signal.signal(signal.SIGTERM, before)
        best = show(study, config, folder)
    return best


def show(study: optuna.Study, config: TuneConfig, folder: Path) -> dict[str, float]:
    """Print the table of all trials and the command of the best one, and draw the study."""
    done = [trial for trial in study.trials if trial.state.name in ("COMPLETE", "PRUNED")]
    if not done:
        return {}
    write_table(folder / "results.csv", [row(trial) for trial in done], of="trial")
    if paths := draw_study(study, folder):
        print(f"drawn: {', '.join(map(str, paths))}")
    if all(trial.state.name == "PRUNED" for trial in done):
        return {}
    options = shlex.join([*config.options, *arguments(study.best_trial.params)])
    print(f"train with the best options: python train.py {options}", flush=True)
    return {"AP": study.best_value}


def row(trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
    """The row of a trial in the table."""
    result = trial.value if trial.state.name == "COMPLETE" else "pruned"
    return {
        "job": trial.number,
        "setting": shown(trial.params),
        "result": result,
        "folder": str(Path(trial.user_attrs[FOLDER]).absolute()),
    }


def found_devices() -> list[str]:
    """The number of each GPU, or the CPU without one."""
    import torch

    return [str(number) for number in range(torch.cuda.device_count())] or ["cpu"]
