"""Published weights from a server on this machine: fetched once, verified, or one sentence."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conf import ConfigError
from conf.checkpoints import fetch_weights, weights_folder, weights_path
from conf.entry import compose
from conf.network import build_model, open_detector
from conf.schema import TrainConfig
from conf.schema_tools import GetWeightsConfig
from data import DataError
from models import Darknet, published, save_darknet_weights, zoo_cfg
from models.published import PUBLISHED, Published
from scripts.get_weights import get_weights
from tests.file_server import serving

CONTENT = np.random.default_rng(0).bytes(30_000)
SHA1 = hashlib.sha1(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("YOLO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("data.files.RETRIES", 0)
    return tmp_path / "home"


def test_the_folder() -> None:
    assert weights_folder({"YOLO_HOME": "/weights", "XDG_CACHE_HOME": "/x"}) == Path("/weights")
    assert weights_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/hydra-yolov3-spp")
    assert weights_folder({}) == Path.home() / ".cache" / "hydra-yolov3-spp"


@pytest.mark.parametrize(
    ("sha1", "served", "sentence"),
    [
        (SHA1, CONTENT, ""),
        (None, CONTENT, ""),
        (SHA1, CONTENT[:-1], "is damaged"),
        (None, CONTENT + b"0", "is damaged"),
        ("0" * 40, CONTENT, "is damaged"),
    ],
)
@pytest.mark.parametrize("by_hand", [False, True])
def test_only_the_right_file_is_used(sha1: str | None, served: bytes, sentence: str, by_hand: bool, home: Path) -> None:
    """Also where it was put there by hand, and with a network or without."""
    home.mkdir()
    path = home / "a.weights"
    with serving(served) as server:
        entry = Published(("yolov3",), "coco", f"{server.url}/a.weights", len(CONTENT), sha1)
        if by_hand:
            path.write_bytes(served)
        if sentence:
            with pytest.raises(DataError, match=rf"a\.weights {sentence}"):
                fetch_weights(entry)
        else:
            assert fetch_weights(entry) == path and path.read_bytes() == CONTENT
            assert server.requests == (not by_hand)
    if not sentence:
        assert fetch_weights(entry) == path, "the server is gone"
        path.unlink()
    with pytest.raises(DataError, match=rf"{server.url}/a\.weights cannot be fetched into {path} .*\. fix: check"):
        fetch_weights(entry)


def test_a_place_that_is_not_the_users_is_one_sentence(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry, listed = PUBLISHED[2], GetWeightsConfig(name="list", debug=False)
    home.mkdir()
    path = home / entry.file_name
    path.symlink_to(path)  # as unreadable as a forbidden file, also for root
    for action in (lambda: fetch_weights(entry), lambda: get_weights(listed)):
        with pytest.raises(
            ConfigError, match=rf"^cannot read {path} \(.*\)\. fix: its .*, or YOLO_HOME=<another folder>$"
        ):
            action()
    path.unlink()
    path.write_bytes(b"0")
    monkeypatch.setenv("YOLO_HOME", str(path))  # which is no folder
    get_weights(listed)
    with pytest.raises(DataError, match=rf"cannot be fetched into {path}/"):
        fetch_weights(entry)


def test_a_network_starts_from_them_and_keeps_its_own_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    source = Darknet(zoo_cfg("yolov4-tiny"))
    save_darknet_weights(source, tmp_path / "whole")
    save_darknet_weights(source, tmp_path / "cut", up_to_layer=29)
    config = compose("train", TrainConfig, ["model=yolov4-tiny", "model.weights=coco"]).model
    with serving((tmp_path / "whole").read_bytes()) as server:
        entries = [
            entry._replace(url=f"{server.url}/{entry.file_name}", sha1=None)
            for entry in PUBLISHED
            if "yolov4-tiny" in entry.networks
        ]
        monkeypatch.setattr(published, "PUBLISHED", entries)
        detector = open_detector(None, config, None, None)
        assert (detector.names[0], detector.names[-1], server.requests) == ("person", "toothbrush", 1)
        assert detector.model.layers[36].conv.weight.equal(source.layers[36].conv.weight)
        model, report = build_model(config, 3)
        assert "its heads were left out and start fresh (for 80 classes, here 3)" in str(report)
        assert model.layers[35].conv.weight.equal(source.layers[35].conv.weight)
        server.content = (tmp_path / "cut").read_bytes()
        backbone = replace(config, weights="backbone")
        model, report = build_model(backbone, 3)
        assert "the file ends after layer" in str(report) and server.requests == 2
        assert model.layers[28].conv.weight.equal(source.layers[28].conv.weight)
        with pytest.raises(ConfigError, match=r"this suits training only"):
            build_model(backbone, None, whole=True)
        (tmp_path / "three.names").write_text("a\nb\nc\n")
        with pytest.raises(ConfigError, match=r"for 80 classes, here 3\): this .*\. fix: .* data or names= with"):
            open_detector(None, config, str(tmp_path / "three.names"), None)
    assert weights_path(replace(config, weights=None)) is None
