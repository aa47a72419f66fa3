"""Downloads from a local server that breaks off, refuses and lies; malicious archives."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from data import DataError
from data.formats import download as download_module
from data.formats.download import Expected, download, unpack
from tests.file_server import FileServer, serving

CONTENT = np.random.default_rng(0).bytes(300_000)
MD5 = hashlib.md5(CONTENT).hexdigest()
RIGHT = Expected(MD5)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setattr(download_module, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(download_module, "CHUNK", 10_000)
    with serving(CONTENT) as running:
        yield running


def nothing(done: int, total: int) -> None:
    pass


def test_a_download_goes_on_where_it_broke_off(server: FileServer, tmp_path: Path) -> None:
    server.limits = [50_000, 120_000]
    shown: list[tuple[int, int]] = []
    path = tmp_path / "new" / "a.bin"
    download(f"{server.url}/a.bin", path, RIGHT, 2, 10, lambda *state: shown.append(state))
    assert path.read_bytes() == CONTENT and [entry.name for entry in path.parent.iterdir()] == ["a.bin"]
    assert server.ranges == [None, "bytes=50000-", "bytes=170000-"]
    assert shown[-1] == (len(CONTENT), len(CONTENT)) and shown == sorted(shown)
    download(f"{server.url}/a.bin", path, RIGHT, 2, 10, nothing)
    assert len(server.ranges) == 3  # it exists: no further request


def test_what_an_earlier_process_left_is_used(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(CONTENT[:123_456])
    download(f"{server.url}/a.bin", tmp_path / "a.bin", RIGHT, 1, 10, nothing)
    assert server.ranges == ["bytes=123456-"] and (tmp_path / "a.bin").read_bytes() == CONTENT
    (tmp_path / "b.bin.part").write_bytes(CONTENT)  # killed between the last byte and the new name
    download(f"{server.url}/b.bin", tmp_path / "b.bin", RIGHT, 1, 10, nothing)
    assert (tmp_path / "b.bin").read_bytes() == CONTENT


def test_a_server_without_ranges_starts_again(server: FileServer, tmp_path: Path) -> None:
    server.knows_ranges, server.limits = False, [50_000]
    download(f"{server.url}/a.bin", tmp_path / "a.bin", RIGHT, 2, 10, nothing)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_wrong_sum_is_an_error_and_leaves_nothing(server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"has the MD5 {MD5} instead of 0+, so it is damaged. fix: run"):
        download(f"{server.url}/a.bin", tmp_path / "a.bin", Expected("0" * 32), 2, 10, nothing)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_file_and_a_silent_server_are_errors(server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing\.zip: the server says 404 Not Found"):
        download(f"{server.url}/missing.zip", tmp_path / "a.bin", RIGHT, 3, 10, nothing)
    server.limits = [0, 0, 0]
    with pytest.raises(DataError, match=r"after 3 attempts\. fix: run the command again; it resumes from"):
        download(f"{server.url}/a.bin", tmp_path / "a.bin", RIGHT, 3, 10, nothing)


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
    shown: list[tuple[int, int]] = []
    for _ in range(2):  # the second time over existing files
        unpack(archive, tmp_path / "out", lambda *state: shown.append(state))
    assert (tmp_path / "out" / "images" / "1.jpg").read_text().startswith("content")
    assert (tmp_path / "out" / "notes.txt").is_file() and shown[-1] == (2, 2)


@pytest.mark.parametrize(
    "name", ["../evil.txt", "/tmp/evil.txt", "a/../../evil.txt", "..\\evil.txt", "out_link/evil.txt"]
)
@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_entries_outside_the_folder_are_refused(make: object, name: str, tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.mkdir()
    (out / "out_link").symlink_to(elsewhere)
    archive = make(tmp_path / "a", "good.txt", name)
    with pytest.raises(DataError, match="not a plain file inside the folder, so nothing was unpacked"):
        unpack(archive, out, nothing)
    assert [entry.name for entry in out.iterdir()] == ["out_link"] and not list(elsewhere.iterdir())


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_are_refused(kind: bytes, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a plain file"):
        unpack(make_tar(tmp_path / "a.tar", "entry", kind=kind), tmp_path / "out", nothing)
    with pytest.raises(DataError, match="not a plain file"):
        unpack(make_zip(tmp_path / "a.zip", "entry", link=True), tmp_path / "out", nothing)


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(CONTENT)
    with pytest.raises(DataError, match=r"is no \.zip and no \.tar"):
        unpack(tmp_path / "a.zip", tmp_path / "out", nothing)
    whole = make_zip(tmp_path / "b.zip", *[f"{number}.txt" for number in range(50)]).read_bytes()
    cut = bytearray(whole)
    cut[20:1500] = bytes(1480)
    (tmp_path / "b.zip").write_bytes(bytes(cut))
    with pytest.raises(DataError, match="is damaged"):
        unpack(tmp_path / "b.zip", tmp_path / "out", nothing)
