"""The lower learning rate of heads that the initial weights bring: whenever, and only then."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conf import auto
from conf.auto import protect_heads
from conf.entry import compose
from conf.network import build_model
from conf.resume import complete_training
from conf.schema import TrainConfig
from data import ShapesConfig, ensure_shapes
from eval import Evaluation, Evaluator
from models import Darknet, save_darknet_weights, zoo_cfg
from tests.models.cfg_writer import cfg, conv, head
from tests.small_run import small_run
from train import train
from train_utils.checkpoint import load_checkpoint
from train_utils.distributed import World

CPU = World(0, 0, 1, 1, 1, torch.device("cpu"), "none")
GIVEN = ["experiment=finetune", "model=base", "optim.kept_heads_factor=0.1"]


@pytest.fixture
def small(tmp_path: Path) -> TrainConfig:
    """Fine-tuning of a network of three layers from weights for two classes."""
    path, weights = tmp_path / "small.cfg", tmp_path / "small.weights"
    path.write_text(cfg(conv(8, 3, 2), conv(8, 3, 2), head(0, 1)))
    save_darknet_weights(Darknet(path, 2), weights)
    rate = ["optim.lr=0.02"]
    return compose("train", TrainConfig, [*GIVEN, f"model.cfg={path}", f"model.weights={weights}", *rate])


@pytest.mark.parametrize(
    ("classes", "changed", "kept"),
    [
        (2, {}, True),
        (3, {}, False),
        (2, {"fresh_heads": True}, False),
        (2, {"weights": None}, False),
        (2, {"weights": "cut"}, False),
    ],
)
def test_whole_weights_for_these_classes_are_trained_slowly_also_after_a_resume(
    small: TrainConfig, classes: int, changed: dict[str, Any], kept: bool, tmp_path: Path
) -> None:
    if changed.get("weights") == "cut":
        changed = {"weights": str(tmp_path / "cut.weights")}
        save_darknet_weights(Darknet(small.model.cfg, 2), tmp_path / "cut.weights", 2)
    options = replace(small.model, **changed)
    model, _ = build_model(options, classes)
    slow, note = protect_heads(small, CPU, model, 100)
    optim = slow.optim
    assert optim.lr == pytest.approx(0.002 if kept else 0.02)
    said = "the heads of the initial weights are kept, so the learning rate is 0.002 instead of 0.02"
    assert note == (f"optim.kept_heads_factor=0.1: {said}" if kept else None)


def test_a_factor_of_one_changes_nothing_and_rank_0_decides(small: TrainConfig) -> None:
    whole = replace(small, optim=replace(small.optim, kept_heads_factor=1.0))
    assert protect_heads(whole, CPU, build_model(small.model, 2)[0], 100)[0].optim == whole.optim
    other, _ = build_model(small.model, 2)
    optim = protect_heads(small, replace(CPU, rank=1), other, 100)[0].optim
    assert optim == small.optim, "the weights are those of rank 0"
    assert not other.heads_kept


@pytest.mark.parametrize(("seen", "kept"), [(0, True), (999, False), (1000, True)])
def test_weights_that_saw_few_images_are_trained_at_the_full_rate(small: TrainConfig, seen: int, kept: bool) -> None:
    """Less than ten times those of this training, here 100, as before new pictures came."""
    model, _ = build_model(small.model, 2)
    model.seen = seen
    assert (protect_heads(small, CPU, model, 100)[0].optim.lr < small.optim.lr) is kept is model.heads_kept


@pytest.mark.parametrize(
    ("cfg_name", "kept", "frozen"), [("yolov3-tiny", True, 15), ("yolov3-tiny", False, 0), ("my.cfg", True, 0)]
)
def test_the_first_layers_of_a_network_of_the_zoo_are_frozen(cfg_name: str, kept: bool, frozen: int) -> None:
    config = compose("train", TrainConfig, ["experiment=finetune", "model=yolov3-tiny", "train.epochs=10"])
    config = replace(config, model=replace(config.model, weights=None, cfg=cfg_name))
    with torch.device("meta"):
        model = Darknet(zoo_cfg("yolov3-tiny"), 2, 0.125)
    model.heads_kept = kept
    fixed, note = protect_heads(config, CPU, model, 100)
    assert model.num_frozen == fixed.model.freeze == frozen
    whole = replace(config, optim=replace(config.optim, kept_heads_factor=1.0))
    part = "model.freeze=auto: the first 15 layers stay as they are"
    assert protect_heads(whole, CPU, model, 100)[1] == (part if frozen else None)
    assert str(note).endswith(f"; {part}") is (frozen > 0)


def test_a_training_says_what_its_initial_weights_score_and_if_it_got_no_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: not in an extension, which goes on at the lower rate."""
    shapes = ShapesConfig(train_images=8, val_images=3, image_size=64)
    ensure_shapes(tmp_path / "shapes", shapes)
    given = ["train.batch_size=8", "train.epochs=1", "optim.kept_heads_factor=0.1", "optim.lr=0.02"]
    given.append("model.freeze=auto")
    train(small_run(tmp_path / "shapes", shapes, tmp_path / "first", *given))
    assert "initial weights score" not in (tmp_path / "first" / "train.log").read_text()

    monkeypatch.setattr(auto, "MANY_TIMES", 1)  # the first run has seen as many
    scores, call = iter([0.5, 0.4, 0.3]), Evaluator.__call__

    def scored(evaluator: Evaluator, model: torch.nn.Module) -> Evaluation | None:
        evaluation = call(evaluator, model)
        assert evaluation is not None
        evaluation.scores.figures.update(AP=next(scores), AP50=0.75)
        return evaluation

    monkeypatch.setattr(Evaluator, "__call__", scored)
    run = tmp_path / "second"
    train(small_run(tmp_path / "shapes", shapes, run, *given, f"model.weights={tmp_path / 'first'}"))
    train(compose("train", TrainConfig, [f"resume={run}", "extend=1"], complete_training))
    log = (run / "train.log").read_text()
    assert log.count("so the learning rate is 0.002 instead of 0.02; model.freeze=auto: the first 15 layers stay") == 1
    before, after = (load_checkpoint(tmp_path / name / "checkpoints" / "last.pt") for name in ("first", "second"))
    equal = {name for name, values in before["ema"].items() if torch.equal(values, after["model"][name])}
    assert equal >= {name for name in before["ema"] if int(name.split(".")[1]) < 15}
    assert not any(name.endswith("conv.weight") for name in equal if int(name.split(".")[1]) > 15)
    assert log.count("the initial weights score AP 0.5000, AP50 0.7500") == 1
    with (run / "metrics.csv").open(newline="") as file:
        assert all(0 < float(row["lr"]) <= 0.002 for row in csv.DictReader(file))
