"""A study finds the best trial, prunes, stops and goes on; the trainings are stand-ins."""

from __future__ import annotations

import csv
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import optuna
import pytest

from conf.entry import compose
from conf.failures import ConfigError
from conf.programs import PROGRAMS, prepare_arguments
from conf.schema import TrainConfig
from conf.schema_tools import TuneConfig
from conf.sweeps import search
from conf.sweeps.study import draw_study
from scripts.tune import tune

REPOSITORY = Path(__file__).resolve().parents[2]
RATE = "optim.lr=tag(log,interval(1e-4,1))"

# Reaches an AP that is highest for a rate of 0.01, an epoch at a time, and waits after each until
# the search has seen it; a signal or the end of the search stops it, and it goes on where it was.
TRAINING = f"""
import math, os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {str(REPOSITORY)!r})
from train_utils.launch.environment import watched_parent
from train_utils.launch import orphans
given = dict(word.split("=", 1) for word in sys.argv[1:])
folder, rate = Path(given["run_dir"].strip('"')), float(given["optim.lr"])
stop = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: stop.append(1))
orphans.LOOK_SECONDS = 0.05
orphans.watch_parent(watched_parent())
if given["train.epochs"] == "13":
    sys.exit("error: the loss is not finite")
device = folder.parent / f"GPU-{{os.environ['CUDA_VISIBLE_DEVICES']}}"
device.touch(exist_ok=False)
table = folder / "metrics.csv"
if not table.exists():
    table.write_text("epoch,step,AP\\n")
    (folder / "rate").write_text(given["optim.lr"])
assert (folder / "rate").read_text() == given["optim.lr"] and given["resume"] == "auto"
done = len(table.read_text().splitlines()) - 1
for epoch in range(done + 1, int(given["train.epochs"]) + 1):
    with table.open("a") as file:
        file.write(f"{{epoch}},{{10 * epoch}},{{(1 - abs(math.log10(rate) + 2) / 4) * epoch / 100}}\\n")
    deadline, seen = time.monotonic() + 60, folder / "seen"
    while not stop and time.monotonic() < deadline and (not seen.exists() or int(seen.read_text() or 0) < epoch):
        time.sleep(0.002)
    if stop:
        break
device.rename(folder / device.name)
"""


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TuneConfig]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "training.py").write_text(TRAINING)
    monkeypatch.setattr(search, "TRAIN", tmp_path / "training.py")
    monkeypatch.setattr(search, "SECONDS_BETWEEN_LOOKS", 0.01)
    monkeypatch.setattr("scripts.tune.draw_study", lambda *_: [])

    def look(study: optuna.Study, run: search.Run, has_ended=search.has_ended) -> bool:
        ended = has_ended(study, run)
        (run.folder / "seen").write_text(str(len(study.trials[run.trial.number].intermediate_values)))
        return ended

    monkeypatch.setattr(search, "has_ended", look)

    def options(*given: str) -> TuneConfig:
        return compose("tune", TuneConfig, prepare_arguments(["name=x", *given], PROGRAMS["tune"]))

    return options


def table() -> list[dict[str, str]]:
    return list(csv.DictReader(Path("runs/x/results.csv").read_text().splitlines()))


def epochs_of(row: dict[str, str]) -> int:
    return len(search.scores_of(Path(row["folder"])))


def test_a_study_finds_the_best_options_and_prunes_the_hopeless(
    configured: Callable[..., TuneConfig], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    config = configured(
        "trials=7", "startup_trials=2", "prune_after=1", "devices=[0,1]",
        "--", "data=shapes", "train.epochs=6", "name=a b", RATE, "train.seed=0,1",
    )  # fmt: skip
    best = tune(config)["AP"]
    rows = table()
    done = {row["trial"]: float(row["AP"]) for row in rows if row["AP"] != "pruned"}
    pruned = [row for row in rows if row["AP"] == "pruned"]
    assert len(rows) == 7 and best == pytest.approx(max(done.values())) and pruned
    assert all(1 <= epochs_of(row) < 6 for row in pruned)
    seen = [path.name for path in Path("runs/x").glob("trial-*/GPU-*")]
    assert len(seen) == 7 and set(seen) == {"GPU-4", "GPU-7"}, "one trial at a time on each device"
    output = capsys.readouterr().out
    chosen = max(done, key=lambda trial: done[trial])
    assert f"trial {chosen}: AP {best:.4f} after epoch 6" in output
    (command,) = (line for line in output.splitlines() if line.startswith("train with the best options: "))
    trained = compose("train", TrainConfig, shlex.split(command.partition("python train.py ")[2]))
    assert (trained.train.epochs, trained.name, trained.data.name) == (6, "a b", "shapes")
    assert f"optim.lr={trained.optim.lr:.4g} " in next(row["setting"] for row in rows if row["trial"] == chosen)

    config.trials = 8  # the same command goes on with the study
    tune(config)
    assert len(table()) == 8 and table()[:7] == rows


def test_a_search_that_is_stopped_or_killed_leaves_no_training_and_goes_on(
    configured: Callable[..., TuneConfig], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("trials=2", "devices=[cpu]", "--", "data=shapes", "train.epochs=8", RATE)
    folder = Path("runs/x/trial-0000")
    start = f"import sys; from conf.sweeps import search; search.TRAIN = {str(search.TRAIN)!r}; " + (
        "from conf.programs import run; sys.argv[0] = 'tune'; run('tune')"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    killed = subprocess.Popen([sys.executable, "-c", start, "name=x", *given], env=environment)
    deadline = time.monotonic() + 60
    while not search.scores_of(folder) and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    killed.kill()
    killed.wait()
    while not (folder / "GPU-").exists() and time.monotonic() < deadline:  # the last act of the training
        time.sleep(0.02)
    assert "is gone: process" in (folder / "terminal.txt").read_text()

    def interrupt(study: optuna.Study, run: search.Run, has_ended=search.has_ended) -> bool:
        if len(search.scores_of(run.folder)) > 2:
            raise KeyboardInterrupt
        return has_ended(study, run)

    with monkeypatch.context() as during:
        during.setattr(search, "has_ended", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tune(configured(*given))
    assert "trial 0: stopped; the study will go on with it" in capsys.readouterr().out
    assert 2 < len(search.scores_of(folder)) < 8
    tune(configured(*given))
    assert [epochs_of(row) for row in table()] == [8, 8], "the table was continued, not started again"


def test_failed_trials_are_left_out_with_their_reason(
    configured: Callable[..., TuneConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(configured("trials=2", "devices=[cpu]", "--", "data=shapes", "train.epochs=13", RATE)) == {}
    assert "trial 1: failed with code 1: error: the loss is not finite" in capsys.readouterr().out
    assert [row["AP"] for row in table()] == ["fail", "fail"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("devices=[cpu]", "there is nothing to search"),
        ("-- optim.lr=tag(log,interval(1,0.1))", "is no interval"),
        ("-- optim.rl=1,2", "the options of the trials: no option optim.rl"),
        ("-- optim.lr=interval(-1,1)", "optim.lr must be above 0"),
        ("-- data=bcd optim.lr=1,2", "no choice data=bcd"),
        ("-- run_dir=x optim.lr=1,2", "run_dir=x does not fit trials"),
        ("devices=[gpu]", "devices holds gpu"),
        ("-- --config-dir nowhere data=mine optim.lr=1,2", "no choice data=mine"),
    ],
)
def test_what_no_training_would_take_is_refused_at_once(
    given: str, said: str, configured: Callable[..., TuneConfig]
) -> None:
    with pytest.raises(ConfigError, match=said):
        tune(configured(*given.split()))


def test_the_pictures_of_a_study(tmp_path: Path) -> None:
    study = optuna.create_study(direction="maximize")
    floats, choices = optuna.distributions.FloatDistribution(1e-4, 1, log=True), ("yolov3-tiny", "yolov4-tiny")
    space = {"optim.lr": floats, "model": optuna.distributions.CategoricalDistribution(choices)}
    for number in range(12):
        trial = study.ask(space)
        for epoch in range(1, 6):
            trial.report((0.5 - abs(trial.params["optim.lr"] - 0.01)) * epoch / 10, epoch)
        study.tell(trial, number / 30)
    for path in draw_study(study, tmp_path):
        picture = cv2.imread(str(path))
        assert picture is not None and picture.std() > 5, path
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == ["epochs", "options", "trials"]
