"""A server on this machine that breaks off and refuses, for tests of downloads."""

import socket
import struct
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, unquote
from xml.sax.saxutils import escape

from data import remote

SECRET = "wJalrXUtnFEMI-not-to-be-shown"


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


class Bucket(ThreadingHTTPServer):
    """The files below ``folder`` in the bucket "b" of an S3 service, and under their paths by HTTP.

    ``fault`` gets the key of each request for an object and its number, and may return one of
    FAULTS; ``latency`` are seconds before each answer. Keys of what was asked for are in ``asked``.
    """

    FAULTS = ("503", "denied", "gone", "cut", "reset", "slow", "silent")
    page = 5  # names in an answer to a list

    def __init__(self, folder: Path, latency: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), _BucketHandler)
        self.folder, self.latency = folder, latency
        self.fault: Callable[[str, int], str | None] = lambda key, number: None
        self.asked: list[str] = []
        self.authorised = 0

    request_queue_size = 128

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """What makes ``s3://b`` this bucket."""
        return {
            "AWS_ENDPOINT_URL": self.url, "AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }  # fmt: skip

    def handle_error(self, *_: object) -> None:
        pass  # of clients that go away


class _BucketHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Bucket

    def do_GET(self) -> None:
        server = self.server
        time.sleep(server.latency)
        server.authorised += "AWS4-HMAC-SHA256" in self.headers.get("Authorization", "")
        path, _, query = self.path.partition("?")
        options = dict(parse_qsl(query))
        key = unquote(path).removeprefix("/b").strip("/")
        if "list-type" in options:
            return self.answer(200, self.listed(options))
        server.asked.append(key)
        fault = server.fault(key, len(server.asked))
        file = server.folder / key
        if fault == "gone" or not file.is_file():
            return self.answer(404)
        if fault in ("503", "denied"):
            return self.answer(503 if fault == "503" else 403, b"<Error>do not show me</Error>")
        if fault in ("slow", "silent"):
            time.sleep(0.2 if fault == "slow" else 5)
        content, status, more = file.read_bytes(), 200, {"ETag": f'"{file.stat().st_mtime_ns}"'}
        if span := self.headers.get("Range"):
            first, _, last = span.removeprefix("bytes=").partition("-")
            if int(first) >= len(content):
                return self.answer(416)
            stop = min(int(last or len(content)) + 1, len(content))
            more["Content-Range"] = f"bytes {first}-{stop - 1}/{len(content)}"
            content, status = content[int(first) : stop], 206
        return self.answer(status, content, more, broken=fault if fault in ("cut", "reset") else None)

    do_HEAD = do_GET  # noqa: N815

    def do_PUT(self) -> None:
        """Write an object, or copy another one; an answer may be slow, or break off, after that."""
        server, key = self.server, unquote(self.path).removeprefix("/b").strip("/")
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server.asked.append(key)
        fault = server.fault(key, len(server.asked))
        if fault in ("503", "denied"):
            return self.answer(503 if fault == "503" else 403, b"<Error>do not show me</Error>")
        if source := self.headers.get("x-amz-copy-source"):
            from_file = server.folder / unquote(source).strip("/").removeprefix("b/")
            if not from_file.is_file():
                return self.answer(404)
            content = from_file.read_bytes()
        (server.folder / key).parent.mkdir(parents=True, exist_ok=True)
        (server.folder / key).write_bytes(content)
        time.sleep(0.2 if fault == "slow" else 0)
        result, broken = b"<CopyObjectResult><ETag>1</ETag></CopyObjectResult>", fault in ("cut", "reset")
        return self.answer(200, result, {"ETag": '"1"'}, broken=fault if broken else None)

    def answer(
        self, status: int, content: bytes = b"", more: Mapping[str, str] | None = None, broken: str | None = None
    ) -> None:
        self.send_response(status)
        date = "Thu, 01 Jan 2026 00:00:00 GMT"
        for name, value in {"Content-Length": str(len(content)), "Last-Modified": date, **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if broken else content)
        if broken:
            self.wfile.flush()
            if broken == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True

    def listed(self, options: Mapping[str, str]) -> bytes:
        folder = self.server.folder
        keys = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        keys = [key for key in keys if key.startswith(options.get("prefix", ""))]
        start = int(options.get("continuation-token", 0))
        some, rest = keys[start : start + self.server.page], len(keys) > start + self.server.page
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{status.st_mtime_ns}</ETag><Size>{status.st_size}</Size></Contents>"
            for key, status in ((key, (folder / key).stat()) for key in some)
        )
        token = f"<NextContinuationToken>{start + self.server.page}</NextContinuationToken>" * rest
        truncated = f"<IsTruncated>{str(rest).lower()}</IsTruncated>"
        return f"<ListBucketResult><Name>b</Name>{truncated}{token}{entries}</ListBucketResult>".encode()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving_bucket(folder: Path, latency: float = 0.0) -> Iterator[Bucket]:
    """The files of a folder in a bucket while the body runs."""
    remote._store.cache_clear()  # of an earlier bucket
    with Bucket(folder, latency) as running:
        running.daemon_threads = True
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.shutdown()
