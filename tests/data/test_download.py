"""Downloads from a local server that breaks off, refuses and lies; malicious archives."""

from __future__ import annotations

import contextlib
import hashlib
import io
import socket
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from data import DataError
from data.download import download, unpack
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
    assert len(server.ranges) == 1


def test_a_connection_that_breaks_off_is_tried_again(server: FileServer, tmp_path: Path) -> None:
    server.limits = [50_000, 120_000]
    download(f"{server.url}/a.bin", tmp_path / "a.bin", RIGHT)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT and len(server.ranges) == 3


@pytest.mark.parametrize("expected", [("md5:" + "0" * 32, None), (None, 7)])
def test_another_file_is_an_error_and_leaves_nothing(
    expected: tuple[str | None, int | None], server: FileServer, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"a\.bin (is damaged|has 300,000 bytes instead of 7).*\. fix: run"):
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
        with pytest.raises(DataError, match=rf"{address} cannot be fetched into {tmp_path}/a\.bin .*\. fix: check"):
            download(f"{base}/{address}", tmp_path / "a.bin", RIGHT)
    assert list(tmp_path.iterdir()) == []


def make_zip(path: Path, *names: str, link: bool = False) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (0o120777 if link else 0o100644) << 16
            archive.writestr(entry, "content of " + name)
    return path


def make_tar(path: Path, *names: str, kind: bytes = tarfile.REGTYPE) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.size = kind, "/etc/passwd", 7 if kind == tarfile.REGTYPE else 0
            archive.addfile(entry, io.BytesIO(b"content"))
    return path


@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_plain_archives_are_unpacked(make: object, tmp_path: Path) -> None:
    archive = make(tmp_path / "a", "images/1.jpg", "notes.txt")
    for _ in range(2):  # the second time over existing files
        unpack(archive, tmp_path / "out")
    assert (tmp_path / "out" / "images" / "1.jpg").read_text().startswith("content")
    assert (tmp_path / "out" / "notes.txt").is_file()


@pytest.mark.parametrize("name", ["../evil.txt", "/tmp/evil.txt", "a/../../evil.txt"])
@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_nothing_is_unpacked_outside_the_folder(make: object, name: str, tmp_path: Path) -> None:
    archive = make(tmp_path / "a", name)
    with contextlib.suppress(DataError):
        unpack(archive, tmp_path / "out")
    assert not [path for path in tmp_path.rglob("evil.txt") if not path.is_relative_to(tmp_path / "out")]
    assert not Path("/tmp/evil.txt").exists()


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(CONTENT)
    with pytest.raises(DataError, match="is damaged"):
        unpack(tmp_path / "a.zip", tmp_path / "out")
    whole = make_zip(tmp_path / "b.zip", *[f"{number}.txt" for number in range(50)]).read_bytes()
    cut = bytearray(whole)
    cut[20:1500] = bytes(1480)
    (tmp_path / "b.zip").write_bytes(bytes(cut))
    with pytest.raises(DataError, match="is damaged"):
        unpack(tmp_path / "b.zip", tmp_path / "out")
