"""A server on this machine that breaks off, refuses and lies, for tests of downloads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FileServer(ThreadingHTTPServer):
    """Serve ``content`` under any name; ``limits``: bytes after which answers break off."""

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = content
        self.limits: list[int] = []
        self.ranges: list[str | None] = []
        self.knows_ranges = True
        self.pause = 0.0  # seconds before the second half of an answer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        if self.path == "/missing.zip":
            self.send_error(404)
            return
        asked = self.headers.get("Range")
        self.server.ranges.append(asked)
        content = self.server.content
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.server.knows_ranges else 0
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        limit = self.server.limits.pop(0) if self.server.limits else len(content)
        sent = content[start : start + limit]
        self.wfile.write(sent[: len(sent) // 2])
        time.sleep(self.server.pause)
        self.wfile.write(sent[len(sent) // 2 :])

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(content: bytes) -> Iterator[FileServer]:
    """A server of ``content`` while the body runs."""
    with FileServer(content) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.shutdown()
