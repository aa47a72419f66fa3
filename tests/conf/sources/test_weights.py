"""Published weights from a server on this machine: fetched once, verified, or one sentence."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conf.build.network import build_model, open_detector
from conf.entry import compose
from conf.failures import ConfigError
from conf.programs import PROGRAMS, prepare_arguments
from conf.schema import TrainConfig
from conf.schema_tools import GetWeightsConfig
from conf.sources import weights as weights_module
from conf.sources.weights import fetch_weights, weights_folder, weights_path
from data import DataError
from data.formats.download import UnreachableError
from models import Darknet, ModelError, save_darknet_weights, zoo_cfg
from models.weights import published
from models.weights.published import PUBLISHED, Published
from scripts.get_weights import get_weights
from tests.file_server import serving

CONTENT = np.random.default_rng(0).bytes(30_000)
SERVED = {"whole": CONTENT, "cut": CONTENT[:-1], "longer": CONTENT + b"\0"}
SUMS = {"right": hashlib.sha1(CONTENT).hexdigest(), "wrong": "0" * 40, "none": None}
STARTS = """
import sys
from conf.sources.weights import fetch_weights
from models.weights.published import Published
print("ready", flush=True); sys.stdin.readline()
print(fetch_weights(Published(("yolov3",), "coco", sys.argv[1], 30_000)))
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("YOLO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(weights_module, "ATTEMPTS", 1)
    return tmp_path / "home"


def test_the_folder() -> None:
    assert weights_folder({"YOLO_HOME": "/weights", "XDG_CACHE_HOME": "/x"}) == Path("/weights")
    assert weights_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/hydra-yolov3-spp")
    assert weights_folder({}) == Path.home() / ".cache" / "hydra-yolov3-spp"


@pytest.mark.parametrize(
    ("sha1", "served", "start"), list(itertools.product(SUMS, SERVED, ("fresh", "resumed", "by hand")))
)
def test_only_the_right_file_is_used(sha1: str, served: str, start: str, home: Path) -> None:
    """Each with a network and without; a wrong file that was put there by hand is replaced."""
    home.mkdir()
    path, right = home / "a.weights", served == "whole" and sha1 != "wrong"
    wrong = r"bytes instead of 30,000" if served != "whole" else r"has the SHA1 \w+ instead of 0+"
    with serving(SERVED[served]) as server:
        entry = Published(("yolov3",), "coco", f"{server.url}/a.weights", len(CONTENT), SUMS[sha1])
        if start == "resumed":
            (home / "a.weights.part").write_bytes(CONTENT[:10_000])
        elif start == "by hand":
            path.write_bytes(SERVED[served])
        if right:
            assert fetch_weights(entry) == path and path.read_bytes() == CONTENT
            assert server.ranges == {"fresh": [None], "resumed": ["bytes=10000-"], "by hand": []}[start]
        else:
            with pytest.raises(DataError, match=rf"a\.weights {wrong}|a\.weights has .* {wrong}"):
                fetch_weights(entry)
            assert start == "by hand" or not list(home.iterdir())
            if start == "by hand" and sha1 != "wrong":
                server.content = CONTENT
                assert fetch_weights(entry) == path and path.read_bytes() == CONTENT
                path.write_bytes(SERVED[served])
    if right:
        home.chmod(0o500)  # nothing is written where the file is there
        assert fetch_weights(entry) == path
        home.chmod(0o700)
        path.unlink()
    with pytest.raises(UnreachableError) as caught:
        fetch_weights(entry)
    said = str(caught.value)
    assert f"{server.url}/a.weights cannot be reached (" in said and f"fetch the file into {path} by other" in said
    assert said.count("fix: ") == 1 and "\n" not in said
    assert ("instead of" in said) == (start == "by hand" and not right)


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
    with pytest.raises(ConfigError, match=r"^cannot write .* \(.*\)\. fix: a folder .*, as YOLO_HOME=<folder>$"):
        fetch_weights(entry)


def test_two_processes_fetch_once(home: Path) -> None:
    with serving(CONTENT) as server:
        server.pause = 0.5
        command = [sys.executable, "-c", STARTS, f"{server.url}/a.weights"]
        running = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
        ]
        for process in running:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        said = []
        for process in running:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        for process in running:
            said.append(process.communicate(timeout=60)[0].splitlines()[-1])
    assert said == [str(home / "a.weights")] * 2 and (home / "a.weights").read_bytes() == CONTENT
    assert len(server.ranges) == 1 and [path.name for path in home.iterdir()] == ["a.weights"]


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
        assert (detector.names[0], detector.names[-1], len(server.ranges)) == ("person", "toothbrush", 1)
        assert detector.model.layers[36].conv.weight.equal(source.layers[36].conv.weight)
        model, said = build_model(config, 3)
        assert "its heads for 80 classes were left out and those for 3 classes start fresh" in said
        assert model.layers[35].conv.weight.equal(source.layers[35].conv.weight)
        server.content = (tmp_path / "cut").read_bytes()
        backbone = replace(config, weights="backbone")
        model, said = build_model(backbone, 3)
        assert "the file ends after layer" in said and len(server.ranges) == 2
        assert model.layers[28].conv.weight.equal(source.layers[28].conv.weight)
        with pytest.raises(ConfigError, match=r"others would be random, which suits training only"):
            build_model(backbone, None, whole=True)
        (tmp_path / "three.names").write_text("a\nb\nc\n")
        with pytest.raises(ModelError, match=r"is for 80 classes, here there are 3\. fix: data or names= with"):
            open_detector(None, config, str(tmp_path / "three.names"), None)
    assert weights_path(replace(config, weights=None)) is None


def test_the_program(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def start(word: str) -> str:
        get_weights(compose("get_weights", GetWeightsConfig, prepare_arguments([word], PROGRAMS["get_weights"])))
        return capsys.readouterr().out

    home.mkdir()
    chosen = PUBLISHED[2]
    (home / chosen.file_name).write_bytes(b"0")
    lines = start("list").splitlines()
    assert all(any(entry.name in line and entry.kind in line for line in lines) for entry in PUBLISHED)
    assert [line.split()[0] for line in lines if " here " in line] == [chosen.name]
    assert max(map(len, lines[1:])) <= 90
    monkeypatch.setattr("scripts.get_weights.fetch_weights", lambda entry: home / entry.file_name)
    assert start(chosen.name) == f"{home / chosen.file_name} is here: model=yolov3-tiny model.weights=coco\n"
    with pytest.raises(ConfigError, match=r"no published weights are called 'yolo'\. fix: list, or one of yolov3,"):
        start("yolo")
