"""The live view as a browser reads it."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request

import cv2
import numpy as np
import pytest

from train_utils.errors import TrainError
from train_utils.pictures.live_view import LiveView


def test_a_browser_gets_each_new_picture_and_who_leaves_disturbs_nobody() -> None:
    with LiveView(0) as view:
        page = urllib.request.urlopen(view.address, timeout=5).read()
        assert b'src="stream"' in page and b"http" not in page, "a request to elsewhere"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{view.address}/etc/passwd", timeout=5)
        for grey in (40, 200):
            view.show(np.full((24, 32, 3), grey, np.uint8))
            stream = urllib.request.urlopen(f"{view.address}/stream", timeout=5)
            assert stream.headers["Content-Type"] == "multipart/x-mixed-replace; boundary=next"
            assert [stream.readline() for _ in range(2)] == [b"--next\r\n", b"Content-Type: image/jpeg\r\n"]
            length = int(stream.readline().split()[1])
            stream.readline()
            picture = cv2.imdecode(np.frombuffer(stream.read(length), np.uint8), cv2.IMREAD_COLOR)
            assert picture.shape == (24, 32, 3) and abs(picture.mean() - grey) < 3
            stream.close()
        stream = urllib.request.urlopen(f"{view.address}/stream", timeout=5)
        closing = threading.Timer(0.2, view.__exit__, (None, None, None))
        closing.start()
        assert stream.read().endswith(b"\r\n--next\r\n"), "the end of the program leaves the last picture whole"
        closing.join()


def test_only_this_machine_is_served_and_a_port_in_use_is_told() -> None:
    with LiveView(0) as view:
        port = int(view.address.rpartition(":")[2])
        assert view.address == f"http://127.0.0.1:{port}"
        with pytest.raises(OSError):  # 127.0.0.2 stands for any other address of this machine
            socket.create_connection(("127.0.0.2", port), 2)
        with pytest.raises(TrainError, match=rf"port {port} cannot be opened .* fix: show_port=0"):
            LiveView(port)
