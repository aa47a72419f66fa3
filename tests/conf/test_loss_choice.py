"""loss= chooses a section with keys of its own: what is accepted, refused, saved and resumed."""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf

from conf.checkpoints import complete_from_checkpoint
from conf.entry import compose, layered, to_dictionary, to_plain, to_yaml
from conf.failures import ConfigError
from conf.messages import explain
from conf.network import build_loss
from conf.resume import complete_training, continue_run
from conf.schema import CHOICES, EvalConfig, TrainConfig
from data import OnError
from eval import evaluate
from models import DarknetLoss, Head, LossConfig, YoloLoss
from models.config import Balance
from train import train

HEAD = Head(layer=1, stride=32, anchors=((9.0, 9.0),), num_classes=1, all_anchors=((9.0, 9.0),), mask=(0,))


@cache
def composed(*overrides: str) -> TrainConfig:
    return compose("train", TrainConfig, list(overrides))


def refusal_of(*overrides: str) -> str:
    with pytest.raises((ConfigError, HydraException)) as refused:
        composed(*overrides)
    return explain(refused.value, TrainConfig) if isinstance(refused.value, HydraException) else str(refused.value)


def test_each_choice_has_its_class_and_makes_its_loss() -> None:
    assert isinstance(composed().loss, LossConfig)
    assert isinstance(build_loss([HEAD], composed("loss=yolov3").loss), YoloLoss)
    assert isinstance(build_loss([HEAD], composed("loss=darknet").loss), DarknetLoss)
    for name, kind in CHOICES["loss"].items():
        assert type(composed(f"loss={name}").loss) is kind


def test_pooled_terms_are_a_choice_that_the_quickstart_makes() -> None:
    default, pooled = composed().loss, composed("loss=yolov3_pooled").loss
    assert isinstance(default, LossConfig) and default.balance == Balance.auto
    assert pooled == replace(default, balance=Balance.pooled) == composed("experiment=quickstart").loss
    loss = build_loss([HEAD], pooled)
    assert isinstance(loss, YoloLoss) and loss.config.balance == Balance.pooled
    assert composed("experiment=quickstart", "loss=darknet").loss == composed("loss=darknet").loss


def test_sums_come_with_their_learning_rate_unless_another_is_asked_for() -> None:
    assert composed("loss=darknet").optim == composed("optim=darknet").optim
    assert composed("loss=darknet", "experiment=quickstart").optim == composed("optim=darknet").optim
    assert composed("loss=darknet", "optim=sgd").optim == composed("optim=sgd").optim
    assert composed("loss=darknet", "optim.lr=0.5").optim.lr == 0.5


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["loss=darknet", "loss.box=3"], "no option loss.box; did you mean loss.box=3 (of loss=yolov3)?"),
        (["loss=darknet", "+loss.balancee=3"], "no option loss.balancee; did you mean loss.balance (of loss=yolov3)?"),
        (["loss.iou=mse"], "loss.iou: Invalid value 'mse', expected one of [iou, giou, diou, ciou]"),
        (["loss.box=-1"], "loss.box must be 0 or more"),
        (["loss.name=darknet"], "loss.name=darknet has other options. fix: loss=darknet"),
        (["loss=darnet"], "no choice loss=darnet; did you mean loss=darknet? there are: darknet, yolov3"),
    ],
)
def test_keys_of_another_choice_and_wrong_values_are_named(overrides: list[str], said: str) -> None:
    assert said in refusal_of(*overrides)


def resumed(folder: Path, now: list[str], named: list[str], saved: dict[str, Any] | str) -> TrainConfig:
    """What `train.py resume=<folder> <now>` trains with, where the folder holds the configuration
    `saved`.
    """
    (folder / "config.yaml").write_text(saved if isinstance(saved, str) else OmegaConf.to_yaml(saved))
    given = to_dictionary(composed(*now)) | {"resume": str(folder)}
    return to_plain(OmegaConf.create(continue_run(given, [*named, "resume"])), TrainConfig)


def test_a_resumed_run_keeps_its_loss(tmp_path: Path) -> None:
    before = composed("loss=darknet", "train.epochs=5")
    config = resumed(tmp_path, ["train.epochs=7"], ["train.epochs"], to_yaml(before))
    assert (config.loss, config.optim, config.train.epochs) == (before.loss, before.optim, 7)
    other = resumed(tmp_path, ["loss=yolov3", "loss.box=2"], ["loss", "loss.box"], to_yaml(before))
    assert isinstance(other.loss, LossConfig) and other.loss.box == 2 and other.train.epochs == 5


def test_a_saved_name_that_no_longer_exists_is_named(tmp_path: Path) -> None:
    saved = layered(to_dictionary(composed()), {"loss": {"name": "yolov9"}})
    with pytest.raises(ConfigError, match=r"loss\.name=yolov9 is none of yolov3, darknet"):
        resumed(tmp_path, [], [], saved)


@pytest.mark.slow
def test_a_run_with_darknets_loss_trains_resumes_and_is_evaluated(tmp_path: Path) -> None:
    options = [
        "data=shapes", f"data.root={tmp_path}/shapes", f"data.index_dir={tmp_path}/index", "data.workers=0",
        "data.shapes={train_images: 16, val_images: 4, image_size: 64}", "model=yolov4-tiny",
        "model.width=0.125", "train.image_size=64", "train.batch_size=8", "train.micro_batch_size=4",
        "evaluate.every=0", "logger.pictures=false", "loss=darknet",
    ]  # fmt: skip
    run_dir = tmp_path / "run"
    train(composed(*options, "train.epochs=1", f"run_dir={run_dir}"))
    saved = OmegaConf.load(run_dir / "config.yaml")
    assert saved.loss.name == "darknet"
    train(compose("train", TrainConfig, [f"resume={run_dir}", "extend=1"], complete_training))
    with (run_dir / "metrics.csv").open(newline="") as file:
        epochs = list(csv.DictReader(file))
    assert [row["epoch"] for row in epochs] == ["1", "2"] and all(float(row["loss_box"]) > 0 for row in epochs)
    config = compose("eval", EvalConfig, [f"ckpt={run_dir}", "data.on_error=skip"], complete_from_checkpoint)
    assert config.data.on_error == OnError.skip and config.data.name == "shapes", "one key over the checkpoint's data"
    assert evaluate(config).keys() >= {"AP", "AP50"}
