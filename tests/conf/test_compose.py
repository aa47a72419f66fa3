"""The border: what users type, and what they are told when it does not fit."""

import itertools
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from conf import CONF_DIR, ConfigError
from conf.cli.program import PROGRAMS, start
from conf.compose import compose, defaults, from_dictionary, to_dictionary, to_plain, to_yaml
from conf.schema import TrainConfig, kinds_of
from tests.data.sets import a_few_of

Program = Callable[..., str]


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Program:
    """What ``train.py <arguments>`` says: a sentence and its fix in a line. Nothing is left."""
    monkeypatch.chdir(tmp_path)

    def called(*arguments: str, program: str = "train") -> str:
        monkeypatch.setattr(sys, "argv", [f"{program}.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            start(program)
        assert ended.value.code == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert lines[0].startswith("error: ") and all(line.startswith("fix: ") for line in lines[1:]), lines
        assert len(lines) <= 2 and "fix: " not in lines[0], lines
        assert not (tmp_path / "runs").exists(), "a run folder was left behind"
        assert not list(tmp_path.rglob("*.tmp")), "something half-written was left behind"
        return " ".join(lines).removeprefix("error: ")

    return called


SHAPES = [
    "data=shapes", "data.root=shapes", "data.workers=0", "model=yolov3-tiny", "model.width=0.125",
    "data.shapes={train_images: 10, val_images: 2, image_size: 64}", "train.image_size=64", "train.batch_size=4",
]  # fmt: skip


MISFITS = [
    ("+train.foo=1", "train.foo=1 is not an option here"),
    ("data=/x/my.yaml", "data=/x/my.yaml: there is no /x/my.yaml. fix: a name, or the path of a data.yaml"),
    ("data=coko", "no choice data=coko; did you mean data=coco?"),
    ("logger=[csv,tensorbord]", "no choice logger=tensorbord; did you mean logger=tensorboard? there are: csv, "),
    ("train.epochs=null", "train.epochs: "),
    ("train={epoch:3}", "train.epoch= is not an option here. fix: train.epochs takes: integer"),
    ("data=coco loss=null", "data=coco loss=null: Config group override must be"),
    ("train.epochs='99999999999999999'", "train.epochs: 99999999999999999 is not finite, or too large. fix"),
    ("train.epochs=0", "train.epochs must be >= 1, got 0"),
    ("evaluate.nms_iou=1.1", "evaluate.nms_iou must be >= 0 and <= 1, got 1.1"),
    ("loss.anchor_iou=1", "loss.anchor_iou must be >= 0 and < 1, or null, got 1"),
    ("loss=yolov3 loss.l1=0", "loss.l1 is not an option of the loss= that is chosen. fix: leave it out"),
    ("model.anchors=[[0.001,1]]", "model.anchors must be pairs"),
    ("model.box_bins=16", "model.box_bins=0"),
    ("loss.iou=riou", "loss.iou"),
    ("train.multi_scale=[2,1]", "train.multi_scale must be [low, high]"),
    ("data=coco data.shapes.image_size=64", "data.shapes.image_size=64: a section is null here"),
    (
        "data=coco resume=x data.shapes.image_size=64",
        "a section is null here. fix: leave out what would change the training",
    ),
    ("data.root=a=b", "cannot read the option data.root=a=b. fix: quote "),
    ("run_dir=/proc/nothing", "cannot be written"),
    ("train.batch_size=9 train.micro_batch_size=2", "train.micro_batch_size=2 must divide"),
    ("train.batch_size=-9 train.micro_batch_size=2", "train.batch_size must be >= 1"),
    ("train.batch_size=64", "fewer than train.batch_size=64"),
    ("train.image_size=50", "train.image_size=50 is not a multiple"),
    ("model.weights=nothing.weights", "nothing.weights"),
    ("data.names=[circle,hexagon]", "'hexagon'"),
    ("resume=a run_dir=b", "leave run_dir out"),
    ("train.patience=3 evaluate.every=0", "evaluate.every=1"),
]


@pytest.mark.parametrize(("argument", "sentence"), a_few_of(MISFITS, 3))
def test_what_does_not_fit_is_named_before_a_run_folder_is_made(error_of, argument, sentence) -> None:
    words = argument.split()
    assert sentence in error_of(*([] if words[0].startswith("data=") else SHAPES), *words)


@pytest.mark.release
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_option_takes_nan_or_infinity(name: str) -> None:
    schema = PROGRAMS[name].schema
    kinds = kinds_of(schema)
    values = defaults(name, schema, ["data=shapes"] if "data.root" in kinds else [])
    keys = (key for key, kind in kinds.items() if kind is Any or "float" in str(kind))
    for key, value in zip(keys, itertools.cycle([math.nan, [[1.0, -math.inf]], 4e38]), strict=False):
        tree = OmegaConf.create(values)
        OmegaConf.update(tree, key, value)
        with pytest.raises(ConfigError, match=rf"^{re.escape(key)}: -?(nan|inf|4e\+38) is not finite"):
            to_plain(tree, schema)


CHOICES = [  # test_auto.py composes the networks
    (group, path.stem)
    for group in ("data", "augment", "loss", "optim", "evaluate", "experiment")
    for path in sorted((CONF_DIR / group).glob("*.yaml"))
    if path.stem != "base"
]


@pytest.mark.release
@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_composes_and_gives_way_to_what_is_named(group: str, choice: str) -> None:
    named = ["train.epochs=7", *([] if group == "data" else ["data=shapes", "model=yolov4-tiny"])]
    config = compose("train", TrainConfig, [f"{group}={choice}", *named])
    assert config.train.epochs == 7
    if group != "data":
        assert (config.model.cfg, config.data.format) == ("yolov4-tiny", "shapes")
    if group == "experiment":
        assert config.name == (choice if choice == "quickstart" else f"{choice}-shapes")


def test_the_saved_configuration_says_every_key_and_reads_back() -> None:
    config = compose("train", TrainConfig, ["experiment=quickstart", "optim.lr=0.003"])
    assert config.optim.lr == 0.003 and config.name == "quickstart"
    text = to_yaml(config) + to_yaml(compose("train", TrainConfig, ["loss=darknet"]))
    for key in kinds_of(TrainConfig):  # those of all choices
        assert f"{key.split('.')[-1]}:" in text, key
    assert from_dictionary(to_dictionary(config), TrainConfig) == config
