"""The trials of scripts/tune.py: a process of train.py for each, one at a time on each device."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from conf.sweeps.space import quoted
from train_utils.launch.environment import environment_of_child

if TYPE_CHECKING:
    import optuna

TRAIN = Path(__file__).resolve().parents[2] / "train.py"
SECONDS_BETWEEN_LOOKS = 1.0  # at the processes and their tables


@dataclass
class Run:
    """A trial and the process that trains it."""

    trial: optuna.Trial
    process: subprocess.Popen[bytes]
    device: str
    folder: Path
    pruned: bool = False


def search(
    study: optuna.Study,
    space: dict[str, optuna.distributions.BaseDistribution],
    options: Sequence[str],
    devices: Sequence[str],
    trials: int,
    folder: Path,
) -> None:
    """Train until ``trials`` trials have ended, those of earlier searches included.

    Anything that ends the search early stops the running trials; the next search resumes them.
    """
    free, running = list(devices), list[Run]()
    try:
        while missing := trials - sum(trial.state.is_finished() for trial in study.get_trials(deepcopy=False)):
            while free and len(running) < missing:
                running.append(start(study.ask(space), free.pop(0), options, folder))
            time.sleep(SECONDS_BETWEEN_LOOKS)
            for run in list(running):
                if has_ended(study, run):
                    running.remove(run)
                    free.append(run.device)
    finally:
        for run in running:
            run.process.send_signal(signal.SIGINT)
        for run in running:
            run.process.wait()
            print(f"trial {run.trial.number}: stopped; the study will go on with it", flush=True)


def start(trial: optuna.Trial, device: str, options: Sequence[str], study_folder: Path) -> Run:
    """Start the training of a trial, or resume one that was stopped."""
    folder = study_folder / f"trial-{trial.number:04}"
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(TRAIN), *options, *arguments(trial.params)]
    with (folder / "terminal.txt").open("ab") as output:
        process = subprocess.Popen(
            [*command, f"run_dir={quoted(folder)}", "resume=auto"],
            stdout=output,
            stderr=output,
            env=environment_of_child(device),
            start_new_session=True,  # Ctrl-C reaches it once, from search()
        )
    place = device if device == "cpu" else f"GPU {device}"
    print(f"trial {trial.number}: {shown(trial.params)} on {place} -> {folder}", flush=True)
    return Run(trial, process, device, folder)


def has_ended(study: optuna.Study, run: Run) -> bool:
    """Report new epochs and the end of the process to the study; return whether it ended."""
    trial, code = run.trial, run.process.poll()
    known = study.get_trials(deepcopy=False)[trial.number]
    scores = scores_of(run.folder)
    for epoch in scores.keys() - known.intermediate_values.keys():
        trial.report(scores[epoch], epoch)
    if code is None:
        if scores and not run.pruned and trial.should_prune():
            run.pruned = True
            run.process.send_signal(signal.SIGINT)  # an ordinary stop, for which no job is requeued
        return False
    states, best = type(known.state), max(scores, key=lambda epoch: scores[epoch], default=0)
    if run.pruned:
        study.tell(trial, state=states.PRUNED)
        result = f"pruned after epoch {max(scores)} with AP {scores[max(scores)]:.4f}"
    elif code == 0 and scores:
        study.tell(trial, scores[best])
        result = f"AP {scores[best]:.4f} after epoch {best}"
    else:
        study.tell(trial, state=states.FAIL)
        result = f"failed with code {code}: {last_words(run.folder / 'terminal.txt')}"
    print(f"trial {trial.number}: {result}", flush=True)
    return True


def scores_of(folder: Path) -> dict[int, float]:
    """The AP of each scored epoch of the run in ``folder``, from its metrics.csv."""
    path = folder / "metrics.csv"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())  # the last line may be half written
    return {int(row["epoch"]): float(row["AP"]) for row in rows if row.get("AP")}


def last_words(output: Path) -> str:
    """The error in the output of a trial, or where to look."""
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.startswith("error: ")), f"see {output}")


def arguments(params: Mapping[str, object]) -> list[str]:
    """The values of a trial as arguments of train.py."""
    return [f"{key}={value}" for key, value in params.items()]


def shown(params: Mapping[str, object]) -> str:
    """The values of a trial for people: numbers with four digits."""
    return " ".join(arguments({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in params.items()}))
