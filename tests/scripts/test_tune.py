"""A study finds the best trial, prunes, stops and goes on; the trainings are stand-ins, but one."""

from __future__ import annotations

import csv
import shlex
import sys
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
from conf.sweeps.space import parse_space
from conf.sweeps.study import distributions
from scripts.tune import tune

# Reaches an AP that is highest for a rate of 0.01, an epoch at a time, and waits after each until
# the search has seen it; SIGINT stops it, and it goes on where it was.
TRAINING = """
import math, signal, sys, time
from pathlib import Path
given = dict(word.split("=", 1) for word in sys.argv[1:])
folder, rate = Path(given["run_dir"]), float(given["optim.lr"])
stop = []
signal.signal(signal.SIGINT, lambda *_: stop.append(1))
if given["train.epochs"] == "13":
    sys.exit("error: the loss is not finite")
table = folder / "metrics.csv"
if not table.exists():
    table.write_text("epoch,step,AP\\n")
    (folder / "rate").write_text(given["optim.lr"])
assert (folder / "rate").read_text() == given["optim.lr"] and given["resume"] == "auto"
done = len(table.read_text().splitlines()) - 1
for epoch in range(done + 1, int(given["train.epochs"]) + 1):
    with table.open("a") as file:
        file.write(f"{epoch},{10 * epoch},{(1 - abs(math.log10(rate) + 2) / 4) * epoch / 100}\\n")
    deadline, seen = time.monotonic() + 60, folder / "seen"
    while not stop and time.monotonic() < deadline and (not seen.exists() or int(seen.read_text() or 0) < epoch):
        time.sleep(0.002)
    if stop:
        break
"""


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TuneConfig]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "training.py").write_text(TRAINING)
    monkeypatch.setattr(search, "TRAIN", tmp_path / "training.py")
    monkeypatch.setattr(search, "SECONDS_BETWEEN_LOOKS", 0.01)

    def look(self: search.Search, one: search.Running, has_ended=search.Search.has_ended) -> bool:
        ended = has_ended(self, one)
        (one.folder / "seen").write_text(str(one.reported))
        return ended

    monkeypatch.setattr(search.Search, "has_ended", look)

    def options(*given: str) -> TuneConfig:
        return compose("tune", TuneConfig, prepare_arguments(["name=x", *given], PROGRAMS["tune"]))

    return options


def table() -> list[dict[str, str]]:
    return list(csv.DictReader(Path("runs/x/results.csv").read_text().splitlines()))


def epochs_of(row: dict[str, str]) -> int:
    return len(search.scores_of(Path(row["folder"])))


def test_a_study_finds_the_best_options_and_prunes_the_hopeless(
    configured: Callable[..., TuneConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    space = "space.optim.lr=log:1e-4:1"
    config = configured(
        "trials=8", "startup_trials=2", "prune_after=1", space, "space.train.seed=[0,1]", "devices=[cpu,cpu]",
        "--", "data=shapes", "train.epochs=10", 'name="a b"',
    )  # fmt: skip
    best = tune(config)["AP"]
    rows = table()
    done = {row["trial"]: float(row["AP"]) for row in rows if row["AP"] != "pruned"}
    pruned = [row for row in rows if row["AP"] == "pruned"]
    assert len(rows) == 8 and best == pytest.approx(max(done.values())) and pruned
    assert all(1 <= epochs_of(row) < 10 for row in pruned)
    output = capsys.readouterr().out
    chosen = max(done, key=lambda trial: done[trial])
    assert f"trial {chosen}: AP {best:.4f} after epoch 10" in output
    (command,) = (line for line in output.splitlines() if line.startswith("train with the best options: "))
    words = shlex.split(command.partition("python train.py ")[2])
    trained = compose("train", TrainConfig, words)
    assert (trained.train.epochs, trained.name, trained.data.name) == (10, "a b", "shapes")
    assert f"optim.lr={trained.optim.lr:.4g} " in next(row["setting"] for row in rows if row["trial"] == chosen) + " "
    for name in ("trials", "options", "epochs"):
        picture = cv2.imread(f"runs/x/{name}.png")
        assert picture is not None and picture.std() > 5, name

    # The same command does no more; with more trials the study grows.
    tune(config)
    assert len(table()) == 8
    config.trials = 9
    tune(config)
    assert len(table()) == 9 and table()[:8] == rows


def test_a_stopped_study_goes_on_with_the_runs_that_were_stopped(
    configured: Callable[..., TuneConfig], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured("trials=2", "space.optim.lr=log:1e-4:1", "prune=false", "--", "data=shapes", "train.epochs=8")

    def interrupt(one: search.Running, running: Callable[..., bool] = search.Search.has_ended) -> bool:
        if len(search.scores_of(one.folder)) > 1:
            raise KeyboardInterrupt
        return running(stopped, one)

    stopped = None

    class Interrupted(search.Search):
        def __init__(self, *given) -> None:
            nonlocal stopped
            super().__init__(*given)
            stopped = self
            self.has_ended = interrupt

    with monkeypatch.context() as during:
        during.setattr("scripts.tune.Search", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            tune(config)
    assert "trial 0: stopped; the study will go on with it" in capsys.readouterr().out
    assert 1 < len(search.scores_of(Path("runs/x/trial-0000"))) < 8

    # As if tune itself were killed while a trial ran: the trial stays in the study as running.
    study = optuna.load_study(study_name="x", storage="sqlite:///runs/x/study.db")
    study.ask(distributions(parse_space(config.space)))
    tune(config)
    rows = table()
    assert [Path(row["folder"]).name for row in rows] == ["trial-0000", "trial-0003"]
    assert all(epochs_of(row) == 8 for row in rows), "the table was continued, not started again"


def test_failed_trials_end_the_study_with_their_reason(
    configured: Callable[..., TuneConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured("max_failures=2", "space.optim.lr=log:1e-4:1", "--", "data=shapes", "train.epochs=13")
    with pytest.raises(ConfigError, match=r"2 trials failed. fix: see terminal.txt"):
        tune(config)
    assert "trial 1: failed with code 1: error: the loss is not finite" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("devices=[cpu]", "space is empty"),
        ("space.optim.lr=log:0:1", r"space.optim.lr=log:0:1 is no range or list. fix: uniform:LOW:HIGH"),
        ("space.optim.lr=int:1:2:3:4", "is no range or list"),
        ("space.optim.lr=[[1],[2]]", "is no range or list"),
        ("space.optim.rl=log:1e-3:1", "the options of the trials: no option optim.rl"),
        ("space.optim.lr=uniform:-1:1", "optim.lr must be above 0"),
        ("space=sgd -- data=bcd", "no choice data=bcd"),
        ("space=sgd -- optim.lr=1", "optim.lr is in space and behind --"),
        ("space=sgd -- run_dir=x", "run_dir=x does not fit trials"),
        ("space=sgd devices=[gpu]", "devices holds gpu"),
        ("space=sgd -- --config-dir nowhere data=mine", "--config-dir=/.*/nowhere is no folder"),
    ],
)
def test_what_no_training_would_take_is_refused_at_once(
    given: str, said: str, configured: Callable[..., TuneConfig]
) -> None:
    with pytest.raises(ConfigError, match=said):
        tune(configured(*given.split()))


@pytest.mark.slow
def test_a_real_trial(configured: Callable[..., TuneConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "TRAIN", Path(__file__).resolve().parents[2] / "train.py")
    best = tune(
        configured(
            "trials=1", "devices=[cpu]", "space.optim.lr=log:1e-3:1e-1", "space.model=[yolov3-tiny]",
            "--", "data=shapes", "data.root=shapes",
            "data.shapes.train_images=8", "data.shapes.val_images=4", "data.workers=0",
            "model.width=0.125", "train.image_size=64", "train.epochs=1", "train.batch_size=8", "logger.pictures=false",
        )
    )  # fmt: skip
    assert set(best) == {"AP"} and Path("runs/x/trial-0000/checkpoints/best.pt").exists(), sys.version
