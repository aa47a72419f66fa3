"""A live view in a browser: OpenCV without a GUI opens no windows, and a server has no screen."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Thread
from types import TracebackType

import cv2
import numpy as np

from train_utils.errors import TrainError

PAGE = b"""<!doctype html><html lang="en"><meta charset="utf-8"><title>predict.py</title>
<style>body{margin:0;background:#111}img{display:block;margin:auto;max-width:100vw;max-height:100vh}</style>
<img src="stream" alt="what predict.py finds"></html>"""
BOUNDARY = b"next"


class LiveView:
    """Serves the newest drawn picture on 127.0.0.1 as motion JPEG, which browsers show as a film.

    Who watches, and how slowly, changes nothing else: pictures are only encoded for a viewer.
    """

    def __init__(self, port: int) -> None:
        """Listen on ``port``; 0: any that is free. Raises TrainError if it is in use."""
        self._picture: np.ndarray | None = None
        self._number, self._closing, self._changed = 0, False, Condition()
        view = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                view.answer(self)

            def log_message(self, *_: object) -> None:
                """Requests are nobody's news."""

        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as error:
            raise TrainError(
                f"port {port} cannot be opened ({error.strerror}). fix: show_port=0 takes a free one"
            ) from error
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> LiveView:
        Thread(target=self._server.serve_forever, name="view", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()

    def show(self, picture: np.ndarray) -> None:
        """Show a picture (uint8 BGR, H x W x 3)."""
        with self._changed:
            self._picture, self._number = picture, self._number + 1
            self._changed.notify_all()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer a browser: the page, or its pictures until it leaves."""
        if request.path not in ("/", "/stream"):
            request.send_error(404)
            return
        kind = "text/html" if request.path == "/" else f"multipart/x-mixed-replace; boundary={BOUNDARY.decode()}"
        request.send_response(200)
        request.send_header("Content-Type", kind)
        request.send_header("Cache-Control", "no-store")
        request.end_headers()
        try:
            if request.path == "/":
                request.wfile.write(PAGE)
            else:
                self._send_pictures(request)
        except OSError:  # the browser has left
            return

    def _send_pictures(self, request: BaseHTTPRequestHandler) -> None:
        sent = 0
        request.wfile.write(b"--%s\r\n" % BOUNDARY)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._number > sent)  # noqa: B023 - called at once
                if self._number == sent:
                    return
                sent, picture = self._number, self._picture
            assert picture is not None
            jpeg = cv2.imencode(".jpg", picture)[1].tobytes()
            head = b"Content-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n" % len(jpeg)
            # A boundary after each: browsers show a part when they know that it has ended.
            request.wfile.write(head + jpeg + b"\r\n--%s\r\n" % BOUNDARY)
