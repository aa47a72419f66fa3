"""Cameras and streams: real bytes over a local port, dropped frames and ends."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from data import DataError, LiveStream, live_medium
from tests.data.images.test_media import video


class Camera(ThreadingHTTPServer):
    """Sends the frames of a video file in a loop as motion JPEG, as IP cameras do."""

    daemon_threads = True

    def __init__(self, clip: Path, rate: float, port: int = 0) -> None:
        capture = cv2.VideoCapture(str(clip))
        frames = [capture.read()[1] for _ in range(int(capture.get(cv2.CAP_PROP_FRAME_COUNT)))]
        self.jpegs = [cv2.imencode(".jpg", frame)[1].tobytes() for frame in frames]
        self.rate, self.sending, self.sent = rate, True, 0
        super().__init__(("127.0.0.1", port), Handler)
        self.address = f"http://user:secret@127.0.0.1:{self.server_port}/video?key=secret"


class Handler(BaseHTTPRequestHandler):
    server: Camera

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=--next")
        self.end_headers()
        for jpeg in itertools.cycle(self.server.jpegs):
            if not self.server.sending:
                return
            head = f"--next\r\nContent-Type: image/jpeg\r\nContent-Length: {len(jpeg)}\r\n\r\n".encode()
            try:
                self.wfile.write(head + jpeg + b"\r\n")
            except OSError:
                return
            self.server.sent += 1
            time.sleep(1 / self.server.rate)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def camera(clip: Path, rate: float, port: int = 0) -> Iterator[Camera]:
    server = Camera(clip, rate, port)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        server.sending = False
        server.shutdown()
        server.server_close()


def test_what_is_live_and_its_name_holds_no_password() -> None:
    for source, name in (
        ("0", "camera0"), ("12", "camera12"), ("/dev/video3", "camera3"),
        ("rtsp://user:pass@10.0.0.2:554/stream1?token=x", "10-0-0-2-554-stream1"),
        ("https://camera.example/video.mjpg", "camera-example-video-mjpg"),
    ):  # fmt: skip
        medium = live_medium(source)
        assert medium is not None and (medium.name, medium.is_video) == (name, True)
    assert [live_medium(source) for source in ("pictures", "a.mp4", "./0", "C:/a.jpg", "http:a", "list.txt")] == [
        None
    ] * 6


def test_a_stream_gives_its_newest_frame_to_a_slow_reader_and_ends_with_a_warning(tmp_path: Path, caplog) -> None:
    with camera(video(tmp_path / "a.avi", 30), rate=60) as server:
        medium = live_medium(server.address)
        assert medium is not None
        taken: list[tuple[int, int]] = []
        for frame in LiveStream(medium):
            time.sleep(0.1)
            taken.append((frame.number, frame.copies))
            assert frame.size == (48, 64) and frame.medium is medium
            server.sending = len(taken) < 5
    numbers = [number for number, _ in taken]
    assert numbers == sorted(set(numbers)) and numbers[4] - numbers[0] > 8, "old frames queue up"
    assert [copies for _, copies in taken] == np.diff([0, *numbers]).tolist(), "the film is faster than what was seen"
    assert "stopped sending" in caplog.text and "secret" not in caplog.text


def test_a_video_over_http_loses_no_frame_and_ends(tmp_path: Path) -> None:
    clip = video(tmp_path / "clip.avi", 25)
    content = clip.read_bytes()

    class Files(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Files)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    medium = live_medium(f"http://127.0.0.1:{server.server_port}/clip.avi")
    frames = list(LiveStream(medium))
    server.shutdown()
    server.server_close()
    assert [frame.number for frame in frames] == list(range(1, 26))
    assert np.abs([frame.image.mean() - 8 * (frame.number - 1) for frame in frames]).max() < 3


def test_a_camera_is_opened_by_its_number_and_read_in_rgb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The camera is a file: OpenCV gets its number and nothing else."""
    path = str(tmp_path / "red.avi")
    writer = cv2.VideoWriter(path, cv2.VideoWriter.fourcc(*"MJPG"), 10, (64, 48))
    for _ in range(40):
        writer.write(np.full((48, 64, 3), (0, 0, 250), np.uint8))
    writer.release()

    opened = cv2.VideoCapture

    class FileCamera:
        def open(self, device: object) -> bool:
            assert device == 2 and type(device) is int
            self.file = opened(path)
            return bool(self.file.isOpened())

        def get(self, property_id: int) -> float:
            return float(self.file.get(property_id))

        def read(self) -> Any:
            return self.file.read()

        def release(self) -> None:
            self.file.release()

    monkeypatch.setattr(cv2, "VideoCapture", FileCamera)
    frames = list(LiveStream(live_medium("2")))
    assert frames and frames[0].frames_per_second == 10
    assert np.abs(frames[0].image.reshape(-1, 3).mean(0) - (250, 0, 0)).max() < 8


def test_what_cannot_be_opened_is_told_without_its_password() -> None:
    with pytest.raises(DataError, match=r"camera87 cannot be opened. fix: check its address, that it is on"):
        LiveStream(live_medium("87"))
    with pytest.raises(DataError, match=r"127-0-0-1-9-x cannot be opened. fix: check its address") as raised:
        LiveStream(live_medium("http://me:secret@127.0.0.1:9/x"))
    assert "secret" not in str(raised.value)
