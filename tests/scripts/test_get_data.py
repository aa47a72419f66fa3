"""scripts/get_data.py from the command line to the files, against a local server."""

from __future__ import annotations

import hashlib
import socket
import zipfile
from contextlib import ExitStack
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from conf.entry import compose
from conf.failures import ConfigError
from conf.programs import PROGRAMS, prepare_arguments
from conf.schema_tools import GetDataConfig
from data.formats import download as download_module
from data.formats.download import UnreachableError
from scripts.get_data import get_data


def test_a_set_is_fetched_unpacked_and_not_fetched_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served, root = tmp_path / "served", tmp_path / "root"
    served.mkdir()
    with zipfile.ZipFile(served / "pictures.zip", "w") as archive:
        archive.writestr("pictures/1.txt", "one")
    md5 = hashlib.md5((served / "pictures.zip").read_bytes()).hexdigest()

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=served)) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/pictures.zip"
        archives = f"sets.voc2007.archives=[{{url: '{url}', md5: {md5}}}]"
        config = compose(
            "get_data", GetDataConfig, prepare_arguments(["voc2007", f"root={root}", archives], PROGRAMS["get_data"])
        )
        assert get_data(config) == root
        assert (root / "pictures" / "1.txt").read_text() == "one"
        assert not list(root.rglob("*.zip"))  # not kept unless asked
        server.shutdown()
    capsys.readouterr()
    get_data(config)  # the server is gone
    assert "unpacked already" in capsys.readouterr().out


def test_names() -> None:
    assert prepare_arguments(["coco2017", "root=a"], PROGRAMS["get_data"]) == ["root=a", "name=coco2017"]
    for arguments in (["root=a"], ["--help"], []):
        assert prepare_arguments(arguments, PROGRAMS["get_data"]) == arguments
    config = compose("get_data", GetDataConfig, ["name=coco2071"])
    with pytest.raises(ConfigError, match=r"no data set is called 'coco2071'\. fix: one of coco2017, voc2007, voc2012"):
        get_data(config)


@pytest.mark.parametrize(
    "address", ["http://no-such-host.invalid", "http://127.0.0.1:{closed}", "http://127.0.0.1:{deaf}"]
)
def test_without_a_network_it_says_at_once_how_to_fetch_by_hand(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The host is unknown, refuses connections, or does not answer, as behind a firewall."""
    monkeypatch.setattr(download_module, "CONNECT_SECONDS", 0.2)
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it tries again"))
    root = tmp_path / "root"
    with socket.socket() as closed, socket.socket() as deaf, ExitStack() as stack:
        closed.bind(("127.0.0.1", 0))
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        waiting = [stack.enter_context(socket.socket()) for _ in range(2)]
        for client in waiting:  # fills the queue, so that the kernel drops the next connection
            client.setblocking(False)
            client.connect_ex(deaf.getsockname())
        base = address.format(closed=closed.getsockname()[1], deaf=deaf.getsockname()[1])
        content = make_zip(tmp_path / "first.zip")
        sums = [hashlib.md5(content).hexdigest(), "0" * 32, "1" * 32]
        listed = ", ".join(f"{{url: '{base}/{n}.zip', md5: '{md5}'}}" for n, md5 in zip("abc", sums, strict=True))
        config = compose(
            "get_data", GetDataConfig, ["name=voc2007", f"root={root}", f"sets.voc2007.archives=[{listed}]"]
        )
        with pytest.raises(UnreachableError) as caught:
            get_data(config)
        said = str(caught.value)
        assert said.startswith(f"{base}/a.zip cannot be reached (") and said.count("fix: ") == 1 and "\n" not in said
        assert f"wget {base}/a.zip {base}/b.zip {base}/c.zip, copy what it fetched into {root}/.archives and" in said
        (root / ".archives").mkdir(parents=True, exist_ok=True)
        (root / ".archives" / "a.zip").write_bytes(content)  # fetched by hand
        rest = rf"{base}/b\.zip cannot be reached .* wget {base}/b\.zip {base}/c\.zip,"
        with pytest.raises(UnreachableError, match=rest):
            get_data(config)
        assert (root / "pictures" / "1.txt").read_text() == "one"


def make_zip(path: Path) -> bytes:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pictures/1.txt", "one")
    return path.read_bytes()
