"""Search for the best options of a training with Optuna; each trial is a run of train.py.

    python -m scripts.tune -- data=bccd train.epochs=30 'optim.lr=tag(log,interval(0.001,0.1))'
    python -m scripts.tune trials=50 name=tiny -- data=bccd model=yolov3-tiny,yolov4-tiny

Options of train.py follow ``--``; those with several values or an interval are searched. The study
is runs/<name>/study.db. The same command goes on with it after a stop. A trial that is pruned or
stopped ends as any training does, with a checkpoint.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.programs import run

    run("tune")
    raise SystemExit

import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from conf.schema_tools import TuneConfig
from conf.sweeps.search import arguments, search, shown
from conf.sweeps.space import split_options
from conf.sweeps.study import distribution, draw_study, open_study
from conf.sweeps.table import write_table

if TYPE_CHECKING:
    import optuna


def tune(config: TuneConfig) -> dict[str, float]:
    """Run the trials that are missing, then show all; return the best AP, {} without one.

    Raises ConfigError for options that train.py refuses.
    """
    fixed, sweeps = split_options(config.options)
    folder = Path("runs", config.name)
    study = open_study(config, folder / "study.db")
    space = {sweep.get_key_element(): distribution(sweep) for sweep in sweeps}
    if study.trials:
        print(f"{len(study.trials)} trials so far in {folder / 'study.db'}", flush=True)
    devices = found_devices() if config.devices == ["auto"] else config.devices
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        search(study, space, fixed, devices, config.trials, folder)
    finally:
        signal.signal(signal.SIGTERM, before)
        show(study, fixed, folder)
    return {"AP": study.best_value} if has_best(study) else {}


def show(study: optuna.Study, fixed: list[str], folder: Path) -> None:
    """Print the table of all trials that ended and the command of the best, and draw the study."""
    rows = [
        {
            "trial": trial.number,
            "setting": shown(trial.params),
            "AP": trial.value if trial.state.name == "COMPLETE" else trial.state.name.lower(),
            "folder": str(folder / f"trial-{trial.number:04}"),
        }
        for trial in study.trials
        if trial.state.is_finished()
    ]
    if rows:
        write_table(folder / "results.csv", rows)
    if paths := draw_study(study, folder):
        print(f"drawn: {', '.join(map(str, paths))}")
    if has_best(study):
        options = shlex.join([*fixed, *arguments(study.best_params)])
        print(f"train with the best options: python train.py {options}", flush=True)


def has_best(study: optuna.Study) -> bool:
    """Whether a trial trained to its end."""
    return any(trial.state.name == "COMPLETE" for trial in study.trials)


def found_devices() -> list[str]:
    """The number of each GPU, or the CPU without one."""
    import torch

    return [str(number) for number in range(torch.cuda.device_count())] or ["cpu"]
