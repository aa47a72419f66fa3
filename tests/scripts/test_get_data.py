"""scripts/get_data.py from the command line to the files, against a local server."""

from __future__ import annotations

import hashlib
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from conf.entry import compose
from conf.failures import ConfigError
from conf.programs import PROGRAMS, prepare_arguments
from conf.schema_tools import GetDataConfig
from scripts.get_data import SETS, PublicSet, get_data


def test_a_set_is_fetched_unpacked_and_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served, root = tmp_path / "served", tmp_path / "root"
    served.mkdir()
    with zipfile.ZipFile(served / "pictures.zip", "w") as archive:
        archive.writestr("pictures/1.txt", "one")
    md5 = hashlib.md5((served / "pictures.zip").read_bytes()).hexdigest()

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=served)) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/pictures.zip"
        monkeypatch.setitem(SETS, "voc2007", PublicSet("datasets", {url: md5}))
        arguments = prepare_arguments(["voc2007", f"root={root}"], PROGRAMS["get_data"])
        config = compose("get_data", GetDataConfig, arguments)
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
