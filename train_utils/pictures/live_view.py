"""A live view in a browser: OpenCV without a GUI opens no windows, and a server has no screen."""

from __future__ import annotations

from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import TracebackType

import cv2
import numpy as np

from train_utils.errors import TrainError

# The page asks for the next picture when it has shown one: who watches slowly gets fewer.
PAGE = b"""<!doctype html><html lang="en"><meta charset="utf-8"><title>predict.py</title>
<style>body{margin:0;background:#111;color:#ddd;font-family:sans-serif}p{text-align:center}
img{display:block;margin:auto;max-width:100vw;max-height:100vh}</style>
<img alt="" hidden><p>waiting for a picture</p><script>
const image = document.querySelector("img"), said = document.querySelector("p"), next = (wait) =>
  setTimeout(() => { image.src = "picture?" + Date.now() }, wait)
image.onload = () => { image.hidden = false; said.textContent = ""; next(40) }
image.onerror = () => { if (!image.hidden) said.textContent = "the program has ended"; next(1000) }
next(0)</script></html>"""


class LiveView:
    """Serves the newest drawn picture to browsers on this machine.

    Who watches changes nothing else: pictures are only encoded for a viewer.
    """

    def __init__(self, port: int) -> None:
        """Listen on ``port``; 0: any that is free. Raises TrainError if it is in use."""
        self._picture: np.ndarray | None = None
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
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> LiveView:
        Thread(target=self._server.serve_forever, args=(0.1,), name="view", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def show(self, picture: np.ndarray) -> None:
        """Show a picture (uint8 BGR, H x W x 3)."""
        self._picture = picture

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer a browser with the page or the newest picture; 404 for all else."""
        picture, kind, body = self._picture, "text/html", PAGE
        if request.path.startswith("/picture") and picture is not None:
            kind, body = "image/jpeg", cv2.imencode(".jpg", picture)[1].tobytes()
        elif request.path != "/":
            request.send_error(404)
            return
        request.send_response(200)
        request.send_header("Content-Type", kind)
        request.end_headers()
        with suppress(OSError):  # the browser has left
            request.wfile.write(body)
