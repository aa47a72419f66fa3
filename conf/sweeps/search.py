"""The trials of scripts/tune.py: a process of train.py for each, one at a time on each device."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from conf.failures import ConfigError
from conf.schema_tools import TuneConfig
from conf.sweeps.space import arguments, parse_space
from conf.sweeps.study import FOLDER, distributions, put_back
from train_utils.launch.environment import environment_of_device

if TYPE_CHECKING:
    import optuna

TRAIN = Path(__file__).resolve().parents[2] / "train.py"
SECONDS_BETWEEN_LOOKS = 1.0  # at the processes and their tables


@dataclass
class Running:
    """A trial and the process that trains it."""

    trial: optuna.Trial
    process: subprocess.Popen[bytes]
    device: str
    folder: Path
    reported: int = 0  # rows of metrics.csv that the pruner knows
    pruned: bool = False


class Search:
    """The search that fills ``study``, with the runs in ``folder``."""

    def __init__(self, study: optuna.Study, config: TuneConfig, folder: Path) -> None:
        self.study, self.config, self.folder = study, config, folder
        self.space = distributions(parse_space(config.space))
        self.running: list[Running] = []
        self.failures = 0

    def run(self, devices: list[str]) -> None:
        """Train until all trials are done. Whatever ends it early stops the running trials.

        Raises ConfigError after ``max_failures``.
        """
        try:
            while self.running or self.left() > 0:
                free = list(devices)
                for one in self.running:
                    free.remove(one.device)
                for device in free[: max(0, self.left())]:
                    self.start(device)
                time.sleep(SECONDS_BETWEEN_LOOKS)
                self.running = [one for one in self.running if not self.has_ended(one)]
                if self.failures >= self.config.max_failures:
                    raise ConfigError(
                        f"{self.failures} trials failed. fix: see terminal.txt in their folders, or max_failures="
                    )
        finally:
            self.stop()

    def left(self) -> int:
        """The number of trials that are neither done nor running."""
        done = [trial for trial in self.study.get_trials(deepcopy=False) if trial.state.name in ("COMPLETE", "PRUNED")]
        return self.config.trials - len(done) - len(self.running)

    def start(self, device: str) -> None:
        """Start a trial, or go on with one that was stopped."""
        trial = self.study.ask(self.space)
        folder = Path(trial.user_attrs.get(FOLDER, self.folder / f"trial-{trial.number:04}"))
        trial.set_user_attr(FOLDER, str(folder))
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(TRAIN), *self.config.options, *arguments(trial.params)]
        command += [*arguments({"run_dir": str(folder)}), "resume=auto"]
        with (folder / "terminal.txt").open("ab") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env=environment_of_device(device),
                start_new_session=True,  # Ctrl-C reaches it once, through stop()
            )
        self.running.append(Running(trial, process, device, folder))
        place = device if device == "cpu" else f"GPU {device}"
        print(f"trial {trial.number}: {shown(trial.params)} on {place} -> {folder}", flush=True)

    def has_ended(self, one: Running) -> bool:
        """Report new epochs to the pruner, and the end of the process to the study."""
        code, number = one.process.poll(), one.trial.number
        scores = scores_of(one.folder)
        for epoch, score in scores[one.reported :]:
            one.trial.report(score, epoch)
            if not one.pruned and code is None and one.trial.should_prune():
                print(f"trial {number}: pruned after epoch {epoch} with AP {score:.4f}", flush=True)
                one.pruned = True
                one.process.send_signal(signal.SIGINT)  # an ordinary stop, for which no job is requeued
        one.reported = len(scores)
        if code is None:
            return False
        states = self.study.get_trials(deepcopy=False)[number].state.__class__
        if one.pruned:
            self.study.tell(one.trial, state=states.PRUNED)
        elif code == 0 and scores:
            epoch, best = max(scores, key=lambda row: (row[1], -row[0]))
            self.study.tell(one.trial, best)
            print(f"trial {number}: AP {best:.4f} after epoch {epoch}", flush=True)
        else:
            self.study.tell(one.trial, state=states.FAIL)
            self.failures += 1
            print(f"trial {number}: failed with code {code}: {last_words(one.folder)}", flush=True)
        return True

    def stop(self) -> None:
        """Stop the running trials as Ctrl-C stops a training, and let the study go on with them."""
        for one in self.running:
            one.process.send_signal(signal.SIGINT)
        for one in self.running:
            one.process.wait()
            put_back(self.study, one.trial.number, one.trial.params, str(one.folder))
            print(f"trial {one.trial.number}: stopped; the study will go on with it", flush=True)
        self.running = []


def scores_of(folder: Path) -> list[tuple[int, float]]:
    """Epoch and AP of each scored epoch of the run in ``folder``, from its metrics.csv."""
    path = folder / "metrics.csv"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())  # the last line may be half written
    return [(int(row["epoch"]), float(row["AP"])) for row in rows if row.get("AP")]


def last_words(folder: Path) -> str:
    """The error in a trial's output, or where to look."""
    path = folder / "terminal.txt"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.startswith("error: ")), f"see {path}")


def shown(params: dict[str, object]) -> str:
    """The values of a trial for people: numbers with four digits."""
    return " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in params.items()
    )
