"""The border: what users type, and what they are told when it does not fit."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from conf import CONF_DIR
from conf.build.report import save_config
from conf.entry import compose, to_dictionary, to_yaml
from conf.failures import ConfigError
from conf.messages import kinds_of
from conf.programs import run
from conf.resume import complete_training, continue_run
from conf.schema import TrainConfig
from train_utils.errors import TrainError

Program = Callable[..., str]


def compose_training(*overrides: str) -> TrainConfig:
    return compose("train", TrainConfig, list(overrides), complete_training)


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Program:
    """What ``train.py <arguments>`` says on stderr; it must be one sentence, and nothing may be
    left behind.
    """
    monkeypatch.chdir(tmp_path)

    def called(*arguments: str, program: str = "train") -> str:
        monkeypatch.setattr(sys, "argv", [f"{program}.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            run(program)
        assert ended.value.code == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: "), lines
        assert not (tmp_path / "runs").exists(), "a run folder was left behind"
        assert not list(tmp_path.rglob("*.tmp")), "something half-written was left behind"
        return lines[0].removeprefix("error: ")

    return called


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("train.epoch=3", "no option train.epoch; did you mean train.epochs=3?"),
        ("epochs=3", "no option epochs; did you mean train.epochs=3?"),
        ("data.rooot=/x", "no option data.rooot; did you mean data.root=/x?"),
        ("+train.foo=1", "no option train.foo"),
        ("data=/x/my.yaml", "data=/x/my.yaml: there is no /x/my.yaml. fix: one of the names, or the path of a data.ya"),
        ("data=shappes.yml", "data=shappes.yml: there is no shappes.yml. fix: one of the names, or the path of"),
        ("experiment=mine.yaml", "experiment=mine.yaml: there is no mine.yaml. fix: one of the names, or the path of"),
        ("data=coko", "no choice data=coko; did you mean data=coco?"),
        ("model=yolov9", "no choice model=yolov9"),
        ("train.epochs=many", "train.epochs: Value 'many'"),
        ("train.epochs=null", "train.epochs: "),
        ("evaluate.resize=[0.8,1]", "evaluate.resize: "),
        ("train.epochs=0", "train.epochs must be 1 or more, got 0"),
        ("loss.iou=riou", "loss.iou"),
        ("train.multi_scale=[2,1]", "train.multi_scale must be [low, high]"),
        ("optim.lr=-1", "optim.lr must be above 0"),
        ("--epochs=3", "--epochs is no option: options are key=value here. fix: train.epochs=3"),
        ("data.root=a=b", "quote a value"),
        ("train.epochs", "write key=value"),
        ("data.shapes.seed=1", "data.shapes.seed=1: the section is null here. fix: choose what has it"),
        ("model.width=0", "model.width must be above 0"),
        ("evaluate.backend=coco", "evaluate.backend"),
        ("evaluate.rect_pad=-1", "evaluate.rect_pad must lie in 0..8 strides"),
    ],
)
def test_a_wrong_option_is_named_with_its_full_key(error_of: Program, argument: str, said: str) -> None:
    assert said in error_of(argument)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["data.root=nowhere"], "nowhere/annotations/instances_train2017.json"),
        (["train.device=cuda"], "CUDA"),
        (["resume=nowhere"], "nowhere"),
        (["run_dir=/proc/nothing"], "cannot be written"),
        (["train.batch_size=9", "train.micro_batch_size=2"], "train.micro_batch_size=2 must divide"),
        (["train.batch_size=64"], "fewer than train.batch_size=64"),
        (["train.image_size=50"], "train.image_size=50 is not a multiple"),
        (["evaluate.image_size=50"], "evaluate.image_size=50 is not a multiple"),
        (["model.weights=nothing.weights"], "nothing.weights"),
        (["model.weights=nothing.pt"], "nothing.pt"),
        (["model.cfg=nothing.cfg"], "nothing.cfg"),
        (["data.names=[circle,hexagon]"], "'hexagon'"),
        (["resume=a", "run_dir=b"], "leave run_dir out"),
        (["augment.mosaic=0", "augment.mosaic_nine=0.5"], "fix: a larger augment.mosaic"),
    ],
)
def test_what_does_not_fit_stops_before_a_run_folder_is_made(
    error_of: Program, arguments: list[str], said: str
) -> None:
    shapes = [
        "data=shapes", "data.root=shapes", "data.workers=0", "model=yolov3-tiny", "model.width=0.125",
        "data.shapes={train_images: 10, val_images: 2, image_size: 64, seed: 0}", "train.image_size=64",
        "train.batch_size=4",
    ]  # fmt: skip
    coco = arguments == ["data.root=nowhere"]
    assert said in error_of(*([] if coco else shapes), *arguments)


def test_evaluation_without_anything_to_evaluate(error_of: Program) -> None:
    assert "ckpt=" in error_of(program="eval")
    assert "nowhere" in error_of("ckpt=nowhere", program="eval")


@pytest.mark.parametrize("group", ["data", "model", "augment", "loss", "optim", "experiment"])
def test_every_choice_of_a_group_composes(group: str) -> None:
    choices = sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml") if path.stem != "base")
    assert choices
    for choice in choices:
        config = compose("train", TrainConfig, [f"{group}={choice}"])
        assert isinstance(config, TrainConfig)


def test_the_saved_configuration_says_every_key_and_reads_back() -> None:
    config = compose("train", TrainConfig, ["experiment=quickstart", "optim.lr=0.003"])
    assert config.optim.lr == 0.003 and config.name == "quickstart"
    other = ["loss=darknet", "logger=[tensorboard,wandb,mlflow]"]  # kinds_of has those of all choices
    text = to_yaml(config) + to_yaml(compose("train", TrainConfig, other))
    for key in kinds_of(TrainConfig):
        assert f"{key.split('.')[-1]}:" in text, key
    assert to_dictionary(config)["data"]["format"] == "shapes"


def test_a_data_set_of_ones_own_is_one_file_outside_the_repository(tmp_path: Path) -> None:
    """`--config-dir` cannot be given to compose; its search path is what it adds."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.yaml").write_text(
        "defaults: [coco]\nname: mine\nroot: /my/pictures\ntrain: {annotations: a.json, images: a}\n"
    )
    config = compose("train", TrainConfig, ["data=mine", f"hydra.searchpath=[file://{tmp_path}]"])
    assert (config.data.name, config.data.root, config.data.train.images) == ("mine", "/my/pictures", "a")
    assert config.name == "mine"


def test_resume_takes_the_run_s_options_then_those_named(tmp_path: Path) -> None:
    before = to_dictionary(compose("train", TrainConfig, ["experiment=quickstart", "optim.lr=0.5"]))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(before))
    now = to_dictionary(compose("train", TrainConfig, ["data=bccd", "train.epochs=7"])) | {"resume": str(tmp_path)}
    config = continue_run(now, ["data", "train.epochs", "resume"])
    assert config["optim"]["lr"] == 0.5 and config["train"]["batch_size"] == 8, "not the run's options"
    assert config["train"]["epochs"] == 7 and config["data"]["name"] == "bccd", "not those of the command line"
    assert config["resume"] == str(tmp_path) and config["run_dir"] is None


def test_options_beside_resume_hold_for_compose_as_on_a_command_line(tmp_path: Path) -> None:
    before = compose_training("experiment=quickstart", "optim.lr=0.5", "data.workers=3")
    save_config(tmp_path, before)
    found = compose_training(f"resume={tmp_path}", "train.epochs=7", "++data.workers=1")
    assert (found.train.epochs, found.data.workers, found.optim.lr) == (7, 1, 0.5)
    assert found.name == "quickstart" and found.resume == str(tmp_path)


@pytest.mark.parametrize("content", ["", "\n", "{", "a: [", "text", "[1, 2]", "\0\0\0", "a: 1", "train: ["])
def test_a_damaged_config_yaml_is_one_sentence(content: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"^{path} [^\n]+\. fix: a copy of it, [^\n]+$"):
        compose_training(f"resume={tmp_path}")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=rf"^{path} [^\n]+\. fix: a copy of it, [^\n]+$"):
        compose_training(f"resume={tmp_path}")
    path.unlink()
    with pytest.raises(ConfigError, match=r"holds no config\.yaml\. fix: "):
        compose_training(f"resume={tmp_path}")


@pytest.mark.parametrize("call", range(1, 7))
def test_a_full_disk_leaves_the_configuration_as_it_was(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever write, sync or rename is the one that fails."""
    save_config(tmp_path, compose("train", TrainConfig, ["experiment=quickstart"]))
    before, calls = (tmp_path / "config.yaml").read_bytes(), 0

    def fails(function: Callable[..., object]) -> Callable[..., object]:
        def called(*arguments: object) -> object:
            nonlocal calls
            calls += 1
            if calls == call:
                raise OSError(28, "No space left on device")
            return function(*arguments)

        return called

    changed = compose("train", TrainConfig, ["experiment=quickstart", "data.workers=3"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails(os.fsync))
        patch.setattr(os, "replace", fails(os.replace))
        with pytest.raises(TrainError, match=r"cannot write \S+config\.yaml \(No space left on device\)\. fix: "):
            save_config(tmp_path, changed)
    kept = [path.read_bytes() for path in tmp_path.glob("config_until_*.yaml")]
    renamed = call == 6  # only the folder's sync is left then
    assert ((tmp_path / "config.yaml").read_bytes() != before) == renamed
    assert all(content == before for content in kept) and not list(tmp_path.glob("*.tmp"))
    save_config(tmp_path, changed)
    assert "workers: 3" in (tmp_path / "config.yaml").read_text()


def test_a_training_that_torchrun_may_start_again_goes_on_in_its_own_folder_and_in_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a node whose own count of restarts is 0."""
    now = to_dictionary(compose("train", TrainConfig, ["experiment=quickstart"]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    own, foreign = (tmp_path / "runs" / now["name"] / name for name in ("torchrun-7", "newer"))
    for folder in (own, foreign):
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(now))
    (foreign / "checkpoints" / "last.pt").write_text("")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    assert continue_run(now, [])["resume"] == str(own), "also without a checkpoint: it begins again there"
    (own / "checkpoints" / "last.pt").write_text("")
    assert continue_run(now, [])["resume"] == str(own)
    assert continue_run(now | {"resume": str(foreign)}, ["resume"])["resume"] == str(foreign), "the user decides"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(ConfigError, match=r"restart this training 3 times .* fix: torchrun --rdzv-id="):
        continue_run(now, [])
    assert continue_run(now | {"run_dir": str(own)}, ["run_dir"])["resume"] == str(own)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert continue_run(now, [])["resume"] is None, "nothing is started again"


def test_places_in_the_saved_options_hold_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a folder without a slash; words for published weights and names of the zoo stay."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "before").mkdir()
    for given, kept in (("before", f"{tmp_path}/before"), ("coco", "coco"), ("backbone", "backbone")):
        config = compose_training(f"model.weights={given}", "data.root=coco")
        assert (config.model.weights, config.model.cfg) == (kept, "yolov3-spp")
        assert config.data.root == f"{tmp_path}/coco"
    assert compose_training().model.weights is None
