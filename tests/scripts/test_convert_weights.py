"""Conversion of weights from the command line; every program reads the results."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from conf import CheckpointError, ConfigError
from conf.cli.program import start
from conf.compose import compose
from conf.schema import TrainConfig
from eval import evaluate
from models import Darknet, fitted_cfg, load_cfg, load_darknet_weights, parse_cfg, save_darknet_weights, zoo_cfg
from models.config import COCO_NAMES
from tests.models.small_network import PlainNetwork, cfg_text, randomise, small
from train import train
from train_utils.build import build_model, load_network
from train_utils.checkpoint import load_checkpoint
from train_utils.inference.open_checkpoint import open_detector

Command = Callable[..., str]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Output of ``python -m scripts.convert_weights``, or with code=2 its error sentence."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.cfg").write_text(cfg_text())

    def called(*arguments: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["convert_weights.py", *arguments])
        if code == 0:
            start("convert")
            return capsys.readouterr().out
        with pytest.raises(SystemExit) as ended:
            start("convert")
        said = capsys.readouterr().err.strip()
        assert ended.value.code == code and said.startswith("error: ") and said.count("\n") <= 1, said
        return said.removeprefix("error: ").replace("\nfix: ", " fix: ")

    return called


def write_random(model: Darknet, path: Path, version: tuple[int, int, int] = (0, 2, 5), seen: int = 64_000) -> bytes:
    randomise(model)
    model.weights_version, model.seen = version, seen
    save_darknet_weights(model, path)
    return path.read_bytes()


@pytest.mark.parametrize(("version", "seen"), [((0, 1, 0), 7), ((0, 2, 0), 2**40), ((0, 2, 5), 0)])
def test_there_and_back_gives_the_same_bytes(version, seen, command, tmp_path) -> None:
    stored = write_random(small(), tmp_path / "a.weights", version, seen)
    (tmp_path / "a.names").write_text("cat\ndog\n\n")
    said = command("weights=a.weights", "model.cfg=small.cfg", "names=a.names", "out=a.pt")
    assert "initial weights: 7 of 7 convolutions from a.weights" in said
    assert "wrote a.pt: 2 classes, 32 pixels" in said
    assert f"trained on {seen:,} images" in command("ckpt=a.pt", "out=b.weights")
    assert (tmp_path / "b.weights").read_bytes() == stored
    assert load_checkpoint(tmp_path / "a.pt")["names"] == ["cat", "dog"]
    command("ckpt=a.pt", "out=small.conv.9", "up_to_layer=9")  # Darknet's partial
    command("weights=a.weights", "model.cfg=small.cfg", "out=direct.conv.9", "up_to_layer=9")
    cut = (tmp_path / "small.conv.9").read_bytes()
    values = 20 if version[1] == 2 else 16
    assert cut[values:] == stored[values : len(cut)] and cut[12:values] == bytes(values - 12)
    assert cut == (tmp_path / "direct.conv.9").read_bytes()
    message = command("weights=small.conv.9", "model.cfg=small.cfg", "out=c.pt", code=2)
    assert "6 of 7 convolutions from small.conv.9" in message
    assert not (tmp_path / "c.pt").exists()


def test_a_published_network_there_and_back(command: Command, shared_dir: Path, tmp_path: Path) -> None:
    path = shared_dir / "darknet" / "yolo-fastest-1.1" / "yolo-fastest-1.1"
    cfg, weights = path.with_suffix(".1.cfg"), path.with_suffix(".1.weights")
    command(f"weights={weights}", f"model.cfg={cfg}", "out=a.pt")
    command("ckpt=a.pt", "out=b.weights")
    assert (tmp_path / "b.weights").read_bytes() == weights.read_bytes()


def test_a_converted_checkpoint_is_a_detector_and_initial_weights(command: Command, tmp_path: Path) -> None:
    write_random(small(), tmp_path / "a.weights")
    command("weights=a.weights", "model.cfg=small.cfg", "out=a.pt", "image_size=64")
    expected = Darknet(load_cfg(tmp_path / "small.cfg")).eval()
    load_darknet_weights(expected, tmp_path / "a.weights")
    images = torch.rand(1, 3, 64, 64)
    detector = open_detector("a.pt", None, None, None)
    assert (detector.names, detector.image_size) == (["0", "1"], 64)
    config = compose("train", TrainConfig, ["model.cfg=small.cfg", "model.weights=a.pt"])
    initial, report = build_model(config.model, 2)
    for model in (detector.model, initial.eval()):
        assert all(map(torch.equal, model(images), expected(images)))
    assert initial.seen == 64_000 and "7 of 7" in str(report)
    assert "5 of 7 convolutions" in str(build_model(config.model, 5)[1])


@pytest.mark.parametrize(
    ("count", "named", "expected"), [(80, False, COCO_NAMES.read_text()), (80, True, "a b"), (3, False, "0 1 2")]
)
def test_eighty_classes_without_names_are_those_of_coco(count, named, expected, command, tmp_path) -> None:
    write_random(small(count), tmp_path / "a.weights")
    (tmp_path / "n.cfg").write_text(fitted_cfg(small(count)))
    (tmp_path / "n.names").write_text("\n".join(["a b", *map(str, range(1, count))]))
    said = command("weights=a.weights", "model.cfg=n.cfg", "out=a.pt", *["names=n.names"] * named)
    names = load_checkpoint(tmp_path / "a.pt")["names"]
    assert len(names) == count and " ".join(names).startswith(" ".join(expected.splitlines()))
    assert (f"without names=, the classes are {names[0]} to {names[-1]}" in said) is not named


def test_a_state_dict_of_another_system_becomes_a_checkpoint(command: Command, tmp_path: Path) -> None:
    plain = PlainNetwork("module_list", ("Conv2d", "BatchNorm2d"), 1e-4)
    torch.save({"epoch": 7, "model": plain.state_dict()}, tmp_path / "theirs.pt")
    command("weights=theirs.pt", "model.cfg=small.cfg", "out=ours.pt")
    detector, images = open_detector("ours.pt", None, None, None), torch.rand(1, 3, 32, 32)
    for ours, theirs in zip(detector.model(images), plain(images), strict=True):
        torch.testing.assert_close(ours.squeeze(1).permute(0, 3, 1, 2), theirs)


def test_the_cfg_that_fits_is_written(command: Command, tmp_path: Path) -> None:
    write_random(small(5, width=2.0), tmp_path / "wide.weights")
    (tmp_path / "five.names").write_text("a\nb\nc\nd\ne\n")
    network = ("model.cfg=small.cfg", "model.width=2")
    command("weights=wide.weights", *network, "names=five.names", "out=wide.pt")
    command("ckpt=wide.pt", "out=b.weights", "cfg=new/wide.cfg")
    as_darknet = Darknet(load_cfg(tmp_path / "new" / "wide.cfg")).eval()
    load_darknet_weights(as_darknet, tmp_path / "b.weights")
    images = torch.rand(1, 3, 32, 32)
    assert all(map(torch.equal, as_darknet(images), open_detector("wide.pt", None, None, None).model(images)))
    other = ["model.cfg=small.cfg", "model.anchors=[[5,5],[9,8]]"]
    model = Darknet(load_network(compose("train", TrainConfig, other).model))
    assert Darknet(parse_cfg(fitted_cfg(model), "b.cfg")).heads == model.heads != Darknet("small.cfg").heads


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["weights=a.weights", "ckpt=a.pt", "out=b.pt", "model=yolov3"], "give one of weights="),
        (["weights=a.weights", "out=b.pt"], "weights=a.weights needs its network. fix: model=yolov3-spp"),
        (["weights=a.weights", "model.cfg=small.cfg", "out=b.pt", "up_to_layer=3"], "fix: out=b.weights"),
        (["ckpt=a.pt", "out=b.pt"], "does not fit"),
        (["ckpt=a.pt", "out=b.weights", "cfg=./b.weights"], "cfg and out are one file. fix: cfg=b.cfg"),
        (["weights=a.weights", "model.cfg=small.cfg", "out=a.weights"], "fix: out=a.pt"),
        (
            ["weights=a.weights", "model.cfg=small.cfg", "out=b.pt", "names=one.names"],
            "has 2 classes, but names= or data name 1",
        ),
        (["ckpt=a.pt", "out=b.weights", "model.width=2"], "model says nothing about ckpt="),
        (["ckpt=a.pt", "out=b.weights", "up_to_layer=14"], "between 1 and this network's 13 layers, got 14"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(arguments, message, command, tmp_path) -> None:
    write_random(small(), tmp_path / "a.weights")
    (tmp_path / "one.names").write_text("a\n")
    command("weights=a.weights", "model.cfg=small.cfg", "out=a.pt")
    before = set(tmp_path.iterdir())
    assert message in command(*arguments, code=2)
    assert set(tmp_path.iterdir()) == before, "something was written"


@pytest.mark.release
def test_training_and_evaluation_with_converted_weights(command: Command, tmp_path: Path) -> None:
    data = [
        "data=shapes", "data.root=shapes", "data.index_dir=index", "data.workers=0",
        "data.shapes={train_images: 18, val_images: 5, image_size: 64}",
    ]  # fmt: skip
    network = ["model=yolov3-tiny", "model.width=0.125"]

    def trained(run_dir: str, *more: str) -> dict[str, float]:
        options = ["train.image_size=64", "train.batch_size=8", "train.epochs=1", "logger.pictures=false", *more]
        return train([*data, *network, f"run_dir={run_dir}", *options])

    metrics = trained("first")
    assert "trained on 16 images" in command("ckpt=first", "out=a.weights")
    classes = load_checkpoint(tmp_path / "first")["names"]
    for name, names in (("named", classes), ("other", [*classes[1:], "zebra"])):
        (tmp_path / "classes.names").write_text("\n".join(names))
        command("weights=a.weights", *network, "names=classes.names", "image_size=64", f"out={name}.pt")
    assert evaluate([*data, "ckpt=named.pt"]) == metrics
    with pytest.raises(ConfigError, match=r"converted and names no data\. fix: add data="):
        evaluate(["ckpt=other.pt"])
    with pytest.raises(ConfigError, match=r"knows .*other\.pt.*weights converted anew with names="):
        evaluate([*data, "ckpt=other.pt"])
    (tmp_path / "count.cfg").write_text(fitted_cfg(Darknet(zoo_cfg("yolov3-tiny"), len(classes), 0.125)))
    command("weights=a.weights", "model.cfg=count.cfg", "image_size=64", "out=numbered.pt")
    assert evaluate([*data, "ckpt=numbered.pt"]) == metrics, "classes with numbers for names are those of the data"
    trained("next", "model.weights=numbered.pt")
    state = load_checkpoint(tmp_path / "next")
    assert (state["seen"], state["weights_version"]) == (32, [0, 2, 5])
    for path in (tmp_path / "next" / "checkpoints").glob("*.pt"):
        path.write_bytes((tmp_path / "named.pt").read_bytes())
    with pytest.raises(CheckpointError, match=r"holds converted weights, not a training.*fix: start a new run with"):
        train(["resume=next"])
