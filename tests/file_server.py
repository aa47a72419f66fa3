"""A server on this machine that breaks off and refuses, for tests of downloads."""

import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class FileServer(ThreadingHTTPServer):
    """Serve ``content`` under any name; ``limits``: bytes after which answers break off."""

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = content
        self.limits: list[int] = []
        self.requests = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        if self.path == "/missing.zip":
            self.send_error(404)
            return
        self.server.requests += 1
        content = self.server.content
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: self.server.limits.pop(0)] if self.server.limits else content)

    def log_message(self, *_: object) -> None:
        pass


class LockedFolder(SimpleHTTPRequestHandler):
    """Files below a folder, for the user "me" with the password "secret"."""

    def do_GET(self) -> None:
        if self.headers["Authorization"] == f"Basic {b64encode(b'me:secret').decode()}":
            super().do_GET()
        else:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="a"')
            self.send_header("Content-Length", "0")
            self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving_folder(folder: Path) -> Iterator[str]:
    """The port of a server of the files below ``folder``, as text, while the body runs."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(LockedFolder, directory=str(folder))) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield str(running.server_port)
        running.shutdown()


@contextmanager
def serving(content: bytes) -> Iterator[FileServer]:
    """A server of ``content`` while the body runs."""
    with FileServer(content) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.shutdown()
