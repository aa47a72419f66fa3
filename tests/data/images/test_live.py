"""Cameras and streams: real bytes over a local port, dropped frames, losses and ends."""

from __future__ import annotations

import itertools
import logging
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
from data.images import live
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


def test_a_stream_gives_its_newest_frame_to_a_slow_reader(tmp_path: Path) -> None:
    with camera(video(tmp_path / "a.avi", 30), rate=60) as server:
        medium = live_medium(server.address)
        assert medium is not None
        taken: list[tuple[int, int]] = []
        stream = LiveStream(medium, 5, lambda: len(taken) >= 6)
        for frame in stream:
            time.sleep(0.25)
            taken.append((frame.number, frame.copies))
            assert frame.size == (48, 64) and frame.medium is medium
        numbers = [number for number, _ in taken]
        assert len(numbers) == 6 and numbers == sorted(set(numbers))
        assert numbers[-1] - numbers[0] > 10, "old frames queue up"
        assert stream.received >= numbers[-1]
        drawn = sum(copies for _, copies in taken[1:]) / live.RATE
        assert drawn > 0.9, "the drawn film runs faster than what was seen"


def test_a_lost_stream_is_reached_again_or_ends(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(live, "RETRY_SECONDS", 0.1)
    clip = video(tmp_path / "a.avi", 10)
    caplog.set_level(logging.WARNING)
    with camera(clip, rate=50) as server:
        medium = live_medium(server.address)
        frames = iter(LiveStream(medium, 1.0, lambda: False))
        assert next(frames).number == 1
    port = server.server_port
    before = [next(frames).number]
    while "stopped sending" not in caplog.text:
        time.sleep(0.05)
    with camera(clip, rate=50, port=port):
        while "is back after" not in caplog.text:
            time.sleep(0.05)
        before += [next(frames).number for _ in range(3)]
        assert before == sorted(set(before))
    assert len(list(frames)) < 50
    assert "did not come back within 1 s" in caplog.text and "secret" not in caplog.text


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
    frames = list(LiveStream(medium, 5, lambda: False))
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

        def read(self) -> Any:
            return self.file.read()

        def release(self) -> None:
            self.file.release()

    monkeypatch.setattr(cv2, "VideoCapture", FileCamera)
    monkeypatch.setattr(live, "RETRY_SECONDS", 0.01)
    stream = LiveStream(live_medium("2"), 60, lambda: stream.received > 100)  # the file ends, the camera "is back"
    frames = list(stream)
    assert stream.received > 100 and frames
    assert np.abs(frames[0].image.reshape(-1, 3).mean(0) - (250, 0, 0)).max() < 8


def test_what_cannot_be_opened_is_told_without_its_password() -> None:
    with pytest.raises(DataError, match=r"the camera camera87 cannot be opened. fix: check that it is on"):
        LiveStream(live_medium("87"), 5, lambda: False)
    with pytest.raises(DataError, match=r"the stream 127-0-0-1-9-x cannot be opened. fix: check its address") as raised:
        LiveStream(live_medium("http://me:secret@127.0.0.1:9/x"), 5, lambda: False)
    assert "secret" not in str(raised.value)
