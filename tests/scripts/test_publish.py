"""A published folder gives the checkpoint's network to the bit; its card tells what is known."""

from __future__ import annotations

import json
import re
import shlex
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard

from conf.api.calls import options_of
from conf.build.network import build_model, load_initial_weights, model_from_checkpoint, open_detector
from conf.failures import ConfigError
from models.config import ModelConfig
from predict import Detector
from scripts.publish.folder import figures_of, publish
from tests.data.images.test_media import picture
from tests.test_predict import IDS, folder, train_config
from train_utils.errors import CheckpointError
from train_utils.report.best import Best, keep_best
from train_utils.run.checkpoint import load_checkpoint, save_checkpoint
from train_utils.scores.coco_eval import FIGURES, CocoResult
from train_utils.scores.detections import GroundTruth, make_detections
from train_utils.shell import quoted

__all__ = ["folder"]  # a fixture


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """A run folder with the figures of its weights, the class names of which need quotes."""
    path = folder / "run"
    figures = {name: number / 16 for number, name in enumerate(FIGURES)} | {"APl": -1.0}
    state = load_checkpoint(folder / "random.pt")
    state |= {"figures": figures, "best_epoch": 1, "optimizer": {}, "data": {"images": 3, "boxes": 9, "digest": "ab"}}
    save_checkpoint(path / "checkpoints" / "best.pt", state)
    rows = {name: {"images": 2, "boxes": 3, "AP": 0.25, "AP50": -1.0} for name in state["names"]}
    empty = np.zeros(0, int)
    truth = GroundTruth(
        empty, np.zeros((0, 2)), np.zeros(1, int), np.zeros((0, 4)), empty, empty, empty, state["names"]
    )
    detections = make_detections(0, empty, empty, np.zeros((0, 4)))
    keep_best(path, Best(CocoResult(figures, rows, "hotcoco"), truth, detections))
    (path / "proof.json").write_text("{}")
    return path


def published(ckpt: Path, out: Path, *more: str) -> Path:
    return publish(options_of("publish", [f"ckpt={ckpt}", f"out={quoted(str(out))}", *more]))


def test_the_folder_is_the_network_to_the_bit(run: Path, tmp_path: Path) -> None:
    out = published(run, tmp_path / "ours", "license=mit", "data_license=cc0-1.0")
    before, after = (load_checkpoint(path) for path in (run, out))
    assert after["ema"].keys() == before["ema"].keys()
    for name, tensor in before["ema"].items():
        assert tensor.dtype == after["ema"][name].dtype and torch.equal(tensor, after["ema"][name]), name
    picture(tmp_path / "a.png", 90, 120)
    options = {"confidence": 0.6, "device": "cpu"}
    theirs = Detector(run, **options)(tmp_path / "a.png")
    for path in (out, out / "model.safetensors"):
        ours = Detector(path, **options)(tmp_path / "a.png")
        assert ours.to_coco(1) == theirs.to_coco(1) and len(ours) > 5
        assert ours.boxes_xyxy.tobytes() == theirs.boxes_xyxy.tobytes() and ours.names == theirs.names
    assert {row["category_id"] for row in theirs.to_coco(1)} <= set(IDS)
    again = published(out, tmp_path / "again")  # what was published can be published
    assert load_checkpoint(again)["ema"].keys() == before["ema"].keys()
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_it_is_what_ckpt_and_model_weights_take(run: Path, folder: Path, tmp_path: Path) -> None:
    out = published(run, tmp_path / "ours")
    state, opened = load_checkpoint(run), open_detector(str(out), None, None, None)
    assert (opened.names, opened.category_ids, opened.image_size) == (state["names"], IDS, 96)
    assert opened.note == f"{out}: epoch 1, 5 classes"
    config: ModelConfig = train_config(folder).model
    model, _ = build_model(config, 5)
    load_initial_weights(model, out, fresh_heads=False)
    expected = model_from_checkpoint(state)[0].state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    evaluated = options_of("eval", [f"ckpt={out}", "data=shapes"])
    assert evaluated.evaluate.image_size == 96
    with pytest.raises(ConfigError, match="names no data"):
        options_of("eval", [f"ckpt={out}"])


def test_a_plugin_is_named_and_no_part_of_the_folder(run: Path, tmp_path: Path) -> None:
    plugin = Path(__file__).parents[2] / "docs" / "examples" / "plugins" / "squareplus_activation.py"
    plugins = [plugin, plugin.with_name("lines_logger.py")]  # a logger has no part in detecting
    state = load_checkpoint(run)
    state["config"] |= {
        "plugins": [str(path) for path in plugins],
        "plugins_sha256": {path.stem: sha256(path.read_bytes()).hexdigest() for path in plugins},
        "plugin": {"squareplus": {"bend": 2.0}, "lines_log": {"file": "a"}},
    }
    state["config"]["evaluate"]["resize"] = "stretch"
    save_checkpoint(tmp_path / "with.pt", state)
    out = published(tmp_path / "with.pt", tmp_path / "ours")
    assert plugin.name in (card := (out / "README.md").read_text()) and "lines_logger" not in card
    assert 'this/folder", resize="stretch")' in card and "96 pixels (stretch)" in card
    assert "lines" not in (kept := (out / "config.json").read_text()) and "bend" in kept and str(plugin) not in kept
    assert not (out / plugin.name).exists(), "what is downloaded brings no code"
    with pytest.raises(ConfigError, match=f"{plugin.stem}.*, which ckpt=.* needs"):
        Detector(out)
    assert Detector(out, plugins=[plugin], device="cpu").names == state["names"]


def test_the_card_tells_what_is_known_and_what_is_not(run: Path, folder: Path, tmp_path: Path, capsys: Any) -> None:
    card = ModelCard.load(published(run, tmp_path / "ours", "license=MIT", "data_license=ours") / "README.md")
    assert re.findall("note: (.*)", capsys.readouterr().out) == [
        "proof.json names the host, command and folders of the run; remove it if they are nobody's business"
    ]
    assert card.data.license == "mit" and card.data.pipeline_tag == "object-detection"
    known = {result.metric_type: result.metric_value for result in card.data.eval_results or []}
    assert known == {name: round(number / 16, 4) for number, name in enumerate(FIGURES) if name != "APl"}
    assert "| circle | 2 | 3 | 0.250 | - |" in card.text and "| the data | ours |" in card.text
    assert "proof.json" in card.text and (tmp_path / "ours" / "proof.json").is_file()

    card = ModelCard.load(published(folder / "random.pt", tmp_path / "bare", "name=A: b") / "README.md")
    assert "licence of the weights is unknown; license=" in (said := capsys.readouterr().out)
    assert f"hf upload <user>/bare {tmp_path / 'bare'}" in said
    assert card.data.license == "unknown" and card.data.eval_results is None and "# A: b" in card.text
    assert "Not known for these weights." in card.text and "proof.json" not in card.text
    odd = published(folder / "random.pt", tmp_path / "it's ö", "license=Our terms 2", """name='a "b": <c> | #1'""")
    assert f"hf upload <user>/it-s {shlex.quote(str(odd))}\n" in capsys.readouterr().out
    card = ModelCard.load(odd / "README.md")
    assert (card.data.license, card.data.license_name) == ("other", "Our terms 2")
    assert '# a "b": &lt;c> \\| #1\n' in card.text
    for path in [path for path in tmp_path.rglob("*") if path.suffix in (".md", ".json", ".cfg", ".names")]:
        assert str(folder) not in path.read_text(), "paths of this machine are nobody's business"


def test_figures_are_those_of_the_weights(run: Path, tmp_path: Path) -> None:
    state = load_checkpoint(run)
    assert all(figures_of(state, run))
    assert figures_of({**state, "best_epoch": 3}, run) == ({}, {}), "of a better epoch"
    known, classes = figures_of({**state, "figures": {"AP": 0.5, "APl": -1.0}}, run)
    assert (known, classes) == ({"AP": 0.5}, {}), "best.npz is of another epoch"
    assert figures_of(state, tmp_path)[1] == {}


def test_nothing_is_overwritten_or_left_half_done(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = published(run, tmp_path / "ours")
    with pytest.raises(ConfigError, match="ours exists, and nothing is overwritten"):
        published(run, out)

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full_disk)
    with pytest.raises(ConfigError, match="No space left on device"):
        published(run, tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


@pytest.mark.parametrize("name", ["model.safetensors", "model.cfg", "config.json"])
def test_a_changed_byte_is_found(run: Path, tmp_path: Path, name: str) -> None:
    out = published(run, tmp_path / "ours")
    whole = (out / name).read_bytes()
    for damaged in (whole[:-9], whole[:-200] + bytes([whole[-200] ^ 1]) + whole[-199:]):
        (out / name).write_bytes(damaged)
        with pytest.raises(CheckpointError, match="fix: download it again"):
            load_checkpoint(out)
    (out / "config.json").write_text(json.dumps({"model_type": "yolos"}))
    with pytest.raises(CheckpointError, match=r"is not a folder of scripts\.publish"):
        load_checkpoint(out)
