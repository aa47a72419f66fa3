"""``extend=``: more epochs for a finished run, exact wherever it is cut."""

from __future__ import annotations

import csv
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml

from conf import auto
from conf.auto import describe_extension, extend_run
from conf.entry import compose
from conf.failures import ConfigError
from conf.resume import complete_training
from conf.schema import TrainConfig
from data import ShapesConfig, ensure_shapes
from tests.small_run import small_run
from train import train
from train_utils.checkpoint import CheckpointWriter, load_last
from train_utils.distributed import World
from train_utils.errors import TrainError
from train_utils.optim import Schedule
from train_utils.train_state import TrainState

SHAPES = ShapesConfig(train_images=18, val_images=5, image_size=64)  # 2 steps in an epoch
RESUMED = ("model", "ema", "optimizer", "rng", "step", "seen", "best", "best_epoch", "figures")


def go_on(run: Path, *more: str) -> None:
    train(compose("train", TrainConfig, [f"resume={run}", *more], complete_training))


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def log_of(run: Path) -> str:
    return re.sub(r"^\S+ \S+ ", "", (run / "train.log").read_text(), flags=re.MULTILINE)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch, to be copied."""
    folder = tmp_path_factory.mktemp("extension")
    ensure_shapes(folder / "shapes", SHAPES)
    more = ("train.batch_size=8", "train.epochs=1", "evaluate.every=1", "train.save_every_steps=1")
    train(small_run(folder / "shapes", SHAPES, folder / "run", *more))
    return folder / "run"


def copy_of(finished: Path, folder: Path) -> Path:
    shutil.copytree(finished, folder)
    return folder


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def test_an_extension_is_the_same_wherever_it_is_cut_and_may_be_extended(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut before its first checkpoint and in an epoch; by resume= and by its own command."""
    whole = copy_of(finished, tmp_path / "whole")
    go_on(whole, "extend=2", "evaluate.every=0")
    expected = load_last(whole)[0]
    ways = ((2, "debug=false"), (3, "extend=2"))
    for number, (step, again) in enumerate(ways):
        run = copy_of(finished, tmp_path / f"cut{number}")
        is_due = CheckpointWriter.is_due

        def dies(self: CheckpointWriter, done: int, last: int = step, is_due: Any = is_due) -> bool:
            if done > last:
                self.wait()  # a thread writes the checkpoint
                raise TrainError("power cut")
            return bool(is_due(self, done))

        with monkeypatch.context() as patch, pytest.raises(TrainError, match="power cut"):
            patch.setattr(CheckpointWriter, "is_due", dies)
            go_on(run, "extend=2", "evaluate.every=0")
        assert load_last(run)[0]["step"] == step
        go_on(run, again, "evaluate.every=0")
        found = load_last(run)[0]
        assert [part for part in RESUMED if not same(found[part], expected[part])] == [], (step, again)
        assert (run / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()

    go_on(whole, "extend=1", "evaluate.every=0")
    saved = yaml.safe_load((whole / "config.yaml").read_text())
    assert (saved["extend"], saved["train"]["epochs"], saved["train"]["extended_after"]) == (None, 4, [1, 3])
    assert load_last(whole)[0]["config"]["train"] == saved["train"]
    config = compose("train", TrainConfig, [f"resume={whole}"], complete_training)
    optim = config.optim
    first, second, third = Schedule(optim, 2, 2), Schedule(optim, 2, 6, (2,)), Schedule(optim, 2, 8, (2, 6))
    parts = enumerate((first, second, second, third))
    rates = [optim.lr * schedule.weight_lr_factor(2 * epoch + 1) for epoch, schedule in parts]
    assert [float(row["lr"]) for row in rows(whole)] == rates
    said = (
        r"^extends the run from epoch (\d) to (\d): learning rate from (\S+), .*, to (\S+) in (\d+) steps, .* to (\S+)$"
    )
    told = re.findall(said, log_of(whole), re.M)
    assert [each[:2] for each in told] == [("1", "3"), ("3", "4")] and told[0][2] == f"{rates[0]:.3g}"
    planned, joined = Schedule(optim, 2, 6), 2 + int(told[0][4]) - 1  # what a training of the new length has
    assert told[0][3] == f"{optim.lr * planned.lr_factor(joined):.3g}" != told[0][2]
    assert told[0][5] == f"{optim.lr * planned.lr_factor(5):.3g}"
    assert [describe_extension(config, third, {"epoch": epoch}) is None for epoch in (2, 3, 4)] == [True, False, True]
    assert "changed: train.epochs: 3 -> 4" in log_of(whole)


def no_better(self: TrainState, figures: dict[str, float]) -> bool:
    self.evaluated_epoch = self.epoch
    return False


def test_only_a_finished_run_that_is_named_is_extended(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given, said in (
        (["extend=5"], "extend=5 .* fix: resume=<its folder>"),
        ([f"resume={finished}", "extend=0"], "extend=0 must be 1 or more"),
        (["resume=auto", "extend=5"], "not resume=auto"),
        ([f"resume={finished}", "extend=5", "train.epochs=9"], "without train.epochs"),
    ):
        with pytest.raises(ConfigError, match=said):
            compose("train", TrainConfig, given, complete_training)
    run = copy_of(finished, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"train.epochs: 1 -> 3.*extend="):
        go_on(run, "train.epochs=3")
    before = (run / "config.yaml").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(TrainState, "record", no_better)
        go_on(run, "extend=2", "train.patience=1")
    assert len(rows(run)) == 2 and (run / "config.yaml").read_bytes() != before
    assert list(run.glob("config_until_*.yaml")), "the options of the finished run are gone"
    table = (run / "metrics.csv").read_bytes()
    with pytest.raises(ConfigError, match=r"extend=4 is for a finished run, .* is of epoch 2 of 3\. fix: leave"):
        go_on(run, "extend=4")
    assert (run / "metrics.csv").read_bytes() == table, "a refused extension changed the run"


def test_an_interrupted_extension_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "check_options", lambda _: None)  # there is no folder
    given = ["train.epochs=10", "resume=my run", "extend=2"]
    config = compose("train", TrainConfig, given)
    assert extend_run(config, {"epoch": 10}).train.epochs == 12
    repeated = compose("train", TrainConfig, [*given, "train.extended_after=[8]"])
    assert extend_run(repeated, {"epoch": 7}).train.epochs == 10, "the command of an interrupted extension"


def test_an_extension_has_its_own_patience(finished: Path) -> None:
    """The best epoch of a run of 10 epochs was its third, and it was extended to 30."""
    config = compose("train", TrainConfig, ["train.epochs=30", "train.extended_after=[10]", "train.patience=5"])

    def why_over(epoch: int) -> str | None:
        state = SimpleNamespace(best_epoch=3, evaluated_epoch=epoch, epoch=epoch)
        return TrainState.why_over(cast(TrainState, state), config.train, cast(World, SimpleNamespace(is_main=True)))

    ends = [why_over(epoch) for epoch in (10, 14, 15, 30)]
    late = "no better AP in 5 epochs (train.patience)"
    assert ends == [None, None, late, "all 30 epochs are done"]
