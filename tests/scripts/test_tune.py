"""A study finds the best trial, prunes, goes on after a stop; the trainings are stand-ins."""

import math
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from conf import ConfigError
from conf.cli.program import PROGRAMS
from conf.compose import compose
from conf.schema import TrainConfig, TuneConfig
from scripts import tune

RATE = "optim.lr=tag(log,interval(1e-4,1))"
# Reaches an AP that is highest for a rate of 0.01, an epoch at a time, and waits after each until
# the search has seen it or a signal stops it.
TRAINING = """
import math, signal, sys, time
from pathlib import Path
given = dict(word.split("=", 1) for word in sys.argv[1:])
folder, rate, stop = Path(given["run_dir"].strip('"')), float(given["optim.lr"]), []
signal.signal(signal.SIGINT, lambda *_: stop.append(1))
if given["train.epochs"] == "13":
    (folder / "metrics.csv").write_text("epoch,step,AP\\n1,1,0.9\\n")
    sys.exit("error: the loss is not finite")
(folder / "metrics.csv").write_text("epoch,step,AP\\n")
deadline, seen = time.monotonic() + 60, folder / "seen"
for epoch in range(1, int(given["train.epochs"]) + 1):
    with (folder / "metrics.csv").open("a") as file:
        file.write(f"{epoch},{10 * epoch},{(1 - abs(math.log10(rate) + 2) / 4) * epoch / 100}\\n")
    while not stop and time.monotonic() < deadline and (not seen.exists() or int(seen.read_text() or 0) < epoch):
        time.sleep(0.002)
    if stop:
        (folder / "stopped").touch()
        break
"""


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TuneConfig]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "training.py").write_text(TRAINING)
    monkeypatch.setattr(tune, "TRAIN", tmp_path / "training.py")
    monkeypatch.setattr(tune, "SECONDS_BETWEEN_LOOKS", 0.01)

    def look(folder: Path, scores_of=tune.scores_of) -> dict[int, float]:
        scores = scores_of(folder)
        (folder / "seen").write_text(str(len(scores)))
        return scores

    monkeypatch.setattr(tune, "scores_of", look)

    def options(*given: str) -> TuneConfig:
        return compose("tune", TuneConfig, PROGRAMS["tune"].prepared(["name=x", *given]))

    return options


def lengths() -> list[int]:
    return [len(tune.scores_of(folder)) for folder in sorted(Path("runs/x").glob("trial-*"))]


def test_a_study_finds_the_best_options_prunes_the_hopeless_and_goes_on(configured, capsys) -> None:
    config = configured("trials=11", "--", "data=shapes", "train.epochs=6", "name=a b", RATE, "train.seed=0,1")
    tune.tune(config)
    output, epochs = capsys.readouterr().out, lengths()
    assert len(epochs) == 11 and epochs[:5] == [6] * 5 and any(3 <= length < 6 for length in epochs)
    assert output.count("pruned after epoch") == len(list(Path("runs/x").glob("*/stopped"))) > 0
    results = [tune.scores_of(folder) for folder in Path("runs/x").glob("trial-*")]
    best = max(scores[6] for scores in results if 6 in scores)
    command = output.splitlines()[-1].partition(f"best AP {best:.4f}: python train.py ")[2]
    trained = compose("train", TrainConfig, shlex.split(command))
    assert (trained.train.epochs, trained.name, trained.data.name) == (6, "a b", "shapes")
    assert (1 - abs(math.log10(trained.optim.lr) + 2) / 4) * 6 / 100 == pytest.approx(best)
    assert best > 0.05, "rates are drawn by their logarithm, and half of them are below 0.01"
    config.trials = 12
    config.options.reverse()
    tune.tune(config)
    assert len(lengths()) == 12 and lengths()[:11] == epochs
    for other in (["train.epochs=300", RATE], ["train.epochs=6", "optim.lr=0.1,0.2"]):
        with pytest.raises(ConfigError, match=r"the study runs/x searches with data=shapes .* fix: name=<a new one>"):
            tune.tune(configured("trials=12", "--", "data=shapes", "name=a b", "train.seed=0,1", *other))


def test_a_line_that_is_half_written_is_no_score(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("epoch,step,AP\n1,10,0.25\n2,20,0.5")
    assert tune.scores_of(tmp_path) == {1: 0.25}


def test_a_trial_has_its_best_score(monkeypatch, tmp_path: Path) -> None:
    training = "import sys\nfolder = sys.argv[-1].partition('=')[2].strip('\"')\n"
    training += "open(folder + '/metrics.csv', 'w').write('epoch,step,AP\\n1,1,0.5\\n2,2,0.25\\n')\n"
    (tmp_path / "training.py").write_text(training)
    monkeypatch.setattr(tune, "TRAIN", tmp_path / "training.py")
    trial = SimpleNamespace(number=0, report=lambda *_: None, should_prune=lambda: False)
    assert tune.run_trial(trial, [], {}, tmp_path) == 0.5


def test_whole_numbers_logarithms_and_points_of_their_own(configured, monkeypatch) -> None:
    drawn = []

    def run(trial, fixed, space, folder) -> float:
        drawn.append([tune.draw(trial, key, values) for key, values in space.items()])
        return 0.5

    monkeypatch.setattr(tune, "run_trial", run)
    searched = "--", "data=shapes", "train.epochs=int(interval(1000,20))", RATE
    tune.tune(configured("trials=4", *searched))
    tune.tune(configured("trials=2", "name='y?z#%20'", "seed=5", *searched))
    assert Path("runs/y?z#%20/study.db").is_file()
    epochs, rates = zip(*drawn, strict=True)
    assert all(type(value) is int for value in epochs) and len(set(epochs)) == 6
    assert sum(rate < 0.1 for rate in rates) > 2, "three of four by the logarithm, else one of ten"


def test_a_search_that_is_stopped_leaves_no_training_behind(configured, monkeypatch) -> None:
    config = configured("trials=2", "--", "data=shapes", "train.epochs=8", RATE)

    def interrupt(folder: Path, scores_of=tune.scores_of) -> dict[int, float]:
        if len(scores := scores_of(folder)) > 2:
            raise KeyboardInterrupt
        return scores

    with monkeypatch.context() as during:
        during.setattr(tune, "scores_of", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tune.tune(config)
    assert Path("runs/x/trial-0000/stopped").exists()
    tune.tune(config)
    assert lengths()[1:] == [8, 8], "the stopped trial is none of the two"
