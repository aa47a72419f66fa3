"""Downloads from a local server that breaks off, refuses and lies."""

import hashlib
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from data import DataError
from data.io import download
from tests.file_server import FileServer, serving

CONTENT = np.random.default_rng(0).bytes(300_000)
RIGHT = f"md5:{hashlib.md5(CONTENT).hexdigest()}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setattr("time.sleep", lambda _: None)  # between two attempts
    with serving(CONTENT) as running:
        yield running


def test_a_file_is_fetched_once(server: FileServer, tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.bin"
    for _ in range(2):
        download(f"{server.url}/a.bin", path, RIGHT, len(CONTENT))
        assert path.read_bytes() == CONTENT and [entry.name for entry in path.parent.iterdir()] == ["a.bin"]
    assert server.requests == 1


def test_a_connection_that_breaks_off_is_tried_again(server: FileServer, tmp_path: Path) -> None:
    server.limits = [50_000, 120_000]
    download(f"{server.url}/a.bin", tmp_path / "a.bin", RIGHT)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT and server.requests == 3


@pytest.mark.parametrize("expected", [("md5:" + "0" * 32, None), (None, 7)])
def test_another_file_is_an_error_and_leaves_nothing(expected, server, tmp_path) -> None:
    with pytest.raises(DataError, match=r"a\.bin is damaged, or another file\. fix: run"):
        download(f"{server.url}/a.bin", tmp_path / "a.bin", *expected)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_file_is_replaced(server: FileServer, tmp_path: Path) -> None:
    for expected in ((RIGHT, None), (None, len(CONTENT))):
        (tmp_path / "a.bin").write_bytes(CONTENT[:-1])
        download(f"{server.url}/a.bin", tmp_path / "a.bin", *expected)
        assert (tmp_path / "a.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("address", ["missing.zip", "closed"])
def test_a_file_that_cannot_be_fetched_is_one_sentence(address: str, server: FileServer, tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        base = server.url if address == "missing.zip" else f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(
            DataError, match=rf"{address} cannot be fetched \([^()]*\).* fix: curl .*{tmp_path}/a\.bin "
        ):
            download(f"{base}/{address}", tmp_path / "a.bin", RIGHT)
    assert list(tmp_path.iterdir()) == []
