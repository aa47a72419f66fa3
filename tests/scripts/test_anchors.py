"""scripts/anchors.py writes a model file that train.py accepts."""

from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from conf import ConfigError
from conf.compose import compose
from conf.schema import AnchorsConfig, TrainConfig
from data import open_annotations
from data.anchors import SEED, kmeans_anchors, match_anchors, network_sizes, recall
from models import Darknet, ModelError
from scripts.anchors import find_anchors
from train_utils.build import load_network

SHAPES = "data.shapes={train_images: 30, val_images: 4, image_size: 64}"


def test_the_override_gives_the_network_the_anchors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine" / "model" / "drawn.yaml"
    overrides = [
        "data=shapes", f"data.root={tmp_path}/shapes", f"data.index_dir={tmp_path}/index", SHAPES, "model=yolov4-tiny",
        "image_size=128", "rounds=50", "min_iou=0.7", f"out={out}",
    ]  # fmt: skip
    config = compose("anchors", AnchorsConfig, overrides)
    found = find_anchors(config)
    printed = capsys.readouterr().out
    assert "yolov4-tiny as it is" in printed and "refined" in printed
    sizes = network_sizes(open_annotations(config.data, "train"), 128)
    start = kmeans_anchors(sizes, 5, np.random.default_rng(SEED)).round(1)
    used = found[1:]
    assert f"{len(sizes)} boxes" in printed and f"recall {recall(sizes, used, 0.7):.4f} at IoU 0.7" in printed
    assert match_anchors(sizes, used)[0].mean() > match_anchors(sizes, start)[0].mean(), "not refined"
    mine = f"hydra.searchpath=[file://{tmp_path}/mine]"  # what --config-dir does
    config = compose("train", TrainConfig, [mine, "model=drawn", "model.width=0.25"])
    model = Darknet(load_network(config.model), width=config.model.width)
    assert [list(pair) for pair in model.heads[0].all_anchors] == found.tolist()
    assert found[0].tolist() == [10, 14], "no head has the first"
    assert model.heads[1].anchors == tuple(tuple(pair) for pair in found[[1, 2, 3]].tolist())  # its own mask
    assert f"{found[0][0]:g},{found[0][1]:g}" in model.cfg.text  # which is what a checkpoint keeps
    assert OmegaConf.load(out).defaults[0] == "yolov4-tiny"


def test_another_number_of_anchors_is_refused() -> None:
    config = compose("train", TrainConfig, ["model=yolov3-tiny", "model.anchors=[[10,10],[20,20]]"])
    with pytest.raises(ModelError, match=r"model\.anchors holds 2 anchors, .*yolov3-tiny\.cfg:\d+ needs 6\. fix:"):
        load_network(config.model)
    with pytest.raises(ConfigError, match=r"model\.anchors must be pairs"):
        compose("train", TrainConfig, ["model=yolov3-tiny", "model.anchors=[[10,10],[20]]"])
