"""The demo in a browser shows what predict.py writes, and talks to this machine only."""
# ruff: noqa: F811 - a fixture of another file

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import pytest
import torch

from conf import ConfigError
from conf.cli.from_checkpoint import complete_from_checkpoint
from conf.compose import compose
from conf.schema import DemoConfig
from scripts.demo import Session, build, launch
from tests.data.test_media import picture, video
from tests.test_predict import folder, found  # noqa: F401 - a fixture
from train_utils.inference.detector import Predictor


def options(folder: Path, *more: str) -> DemoConfig:
    given = [f"ckpt={folder / 'random.pt'}", "device=cpu", "confidence=0.5", "nms_iou=0.6", *more]
    return compose("demo", DemoConfig, given, complete_from_checkpoint)


@pytest.fixture
def address(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The demo as it runs; its requests may go nowhere but to this machine."""
    pytest.importorskip("gradio")
    connect, elsewhere = socket.socket.connect, []

    def guarded(self: socket.socket, target: Any) -> None:
        if isinstance(target, tuple) and target[0] not in ("127.0.0.1", "localhost", "::1"):
            elsewhere.append(target)
        connect(self, target)

    monkeypatch.setattr(socket.socket, "connect", guarded)
    config = options(folder)
    page = build(config, tmp_path)
    address = launch(page, config)
    assert address.startswith("http://127.0.0.1:")
    with pytest.raises(OSError):  # 127.0.0.2 stands for any other address of this machine
        socket.create_connection(("127.0.0.2", page.server_port), 2)
    elsewhere.clear()
    yield address
    page.close(verbose=False)
    assert not elsewhere


@pytest.mark.release
def test_a_visitor_drops_files_moves_the_sliders_and_takes_the_camera(page, address, folder, tmp_path) -> None:
    source = tmp_path / "source"
    picture(source / "a.png", 60, 80)
    video(source / "clip.avi", 3, size=(96, 64))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    (source / "broken.png").write_bytes(b"no picture")
    page.set_input_files("input[type=file]", [source / "a.png", source / "broken.png", source / "clip.avi"])
    page.get_by_text("cannot be read: broken.png").wait_for(timeout=60_000)
    _, images, detections = found(
        folder, source, tmp_path / "out", "on_error=skip", "multi_label=false", "confidence=0.5"
    )
    assert page.get_by_text(f"4 images, {len(detections)} detections").is_visible() and detections
    for name, expected in (("images.json", images), ("detections.json", detections)):
        with page.expect_download() as download:
            page.locator(f"a[download='{name}']").click()
        assert json.loads(Path(download.value.path()).read_text()) == expected, name
    page.locator(".thumbnail-item").nth(1).click()
    film = page.locator("video").first
    film.wait_for()
    width = film.evaluate(
        "video => new Promise(done => { video.onloadeddata = () => done(video.videoWidth); video.load() })"
    )
    assert width == 96, "the browser does not play the drawn video"
    highest = sorted(row["score"] for row in detections)[-3]
    slider = page.get_by_label("number input for Lowest confidence")
    slider.fill(f"{highest:.2f}")
    slider.blur()
    left = sum(row["score"] > round(highest, 2) for row in detections)
    page.get_by_text(f"4 images, {left} detections").wait_for(timeout=30_000)
    page.get_by_role("tab", name="Camera").click()
    page.get_by_text("Click to Access Webcam").click()
    page.get_by_role("button", name="capture photo").click()
    drawn = page.locator("img[src*='/file=']:visible")
    drawn.wait_for(timeout=30_000)
    assert drawn.evaluate("image => image.decode().then(() => image.naturalWidth)") > 300
    assert {url.split("/")[2] for url in asked if not url.startswith(("data:", "blob:"))} == {address.split("/")[2]}
    page.close()  # what it still asks for would hold up the end of the server


def test_files_of_one_name_are_told_apart_and_messages_name_no_folder(folder: Path, tmp_path: Path) -> None:
    session = Session(Predictor(options(folder), torch.device("cpu")), tmp_path)
    picture(tmp_path / "one" / "a.png", 60, 80)
    picture(tmp_path / "two" / "a.png", 90, 50)
    paths = [str(tmp_path / name / "a.png") for name in ("one",) * 9 + ("two",)] + [str(tmp_path / "gone.mp4")]
    message, drawn, (images, detections) = session.files(paths, 0.3, 0.6)
    lines, rows = message.split("\n\n"), json.loads(Path(detections).read_text())
    assert lines[0] == f"10 images, {len(rows)} detections" and lines[2] == r"cannot be read: 11 gone\.mp4" and rows
    names = [image["file_name"] for image in json.loads(Path(images).read_text())["images"]]
    assert sorted(names) == sorted(name for _, name in drawn) == sorted(f"{number} a.png" for number in range(1, 11))
    assert [cv2.imread(path).shape[:2] for path, _ in drawn] == [(60, 80)] * 9 + [(90, 50)]
    assert session.files(None, 0.3, 0.6)[:2] == ("0 images, 0 detections", [])
    assert session.camera(None, 0.3, 0.6) is None


def test_without_gradio_a_sentence_says_how_to_get_it(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(ConfigError, match=r"gradio, which is not installed\. fix: uv pip install --python \S+ gradio"):
        build(options(folder), tmp_path)
