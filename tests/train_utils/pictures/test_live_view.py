"""The live view as a browser reads it."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

import cv2
import numpy as np
import pytest

from train_utils.errors import TrainError
from train_utils.pictures.live_view import LiveView


def test_this_machine_gets_the_newest_picture_and_nothing_else() -> None:
    with LiveView(0) as view:
        page = urllib.request.urlopen(view.address, timeout=5).read()
        assert b'"picture?"' in page and b"//" not in page, "a request to elsewhere"
        for path in ("picture", "etc/passwd"):  # the first: nothing is drawn yet
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"{view.address}/{path}", timeout=5)
        for grey in (40, 200):
            view.show(np.full((24, 32, 3), grey, np.uint8))
            answer = urllib.request.urlopen(f"{view.address}/picture?{grey}", timeout=5)
            assert answer.headers["Content-Type"] == "image/jpeg"
            picture = cv2.imdecode(np.frombuffer(answer.read(), np.uint8), cv2.IMREAD_COLOR)
            assert picture is not None and picture.shape == (24, 32, 3) and abs(picture.mean() - grey) < 3
        port = int(view.address.rpartition(":")[2])
        assert view.address == f"http://127.0.0.1:{port}"
        with pytest.raises(OSError):  # 127.0.0.2 stands for any other address of this machine
            socket.create_connection(("127.0.0.2", port), 2)
        with pytest.raises(TrainError, match=rf"port {port} cannot be opened .* fix: show_port=0"):
            LiveView(port)
