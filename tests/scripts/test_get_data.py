"""scripts/get_data.py from the command line to the files, against a local server."""

import hashlib
import io
import tarfile
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from conf import ConfigError
from conf.entry import compose
from conf.programs import PROGRAMS, prepare_arguments
from conf.schema import GetDataConfig
from scripts.get_data import SETS, get_data


def test_a_set_is_fetched_unpacked_and_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served, root = tmp_path / "served", tmp_path / "root"
    served.mkdir()
    with zipfile.ZipFile(served / "pictures.zip", "w") as zipped:
        zipped.writestr("pictures/1.txt", "one")
    with tarfile.open(served / "labels.tar", "w") as tarred:
        tarred.addfile(tarfile.TarInfo("labels/1.txt"), io.BytesIO())
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=served)) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        archives = {
            f"http://127.0.0.1:{server.server_port}/{path.name}": hashlib.md5(path.read_bytes()).hexdigest()
            for path in served.iterdir()
        }
        monkeypatch.setitem(SETS, "voc2007", ("datasets", archives))
        arguments = prepare_arguments(["voc2007", f"root={root}"], PROGRAMS["get_data"])
        config = compose("get_data", GetDataConfig, arguments)
        assert get_data(config) == root
        server.shutdown()
    assert (root / "pictures" / "1.txt").read_text() == "one" and (root / "labels" / "1.txt").is_file()
    assert not [*root.rglob("*.zip"), *root.rglob("*.tar")]
    capsys.readouterr()
    get_data(config)  # the server is gone
    assert capsys.readouterr().out.count("unpacked already") == 2
    with pytest.raises(ConfigError, match=r"no data set is called 'coco'\. fix: one of coco2017, voc2007, voc2012"):
        get_data(compose("get_data", GetDataConfig, ["name=coco"]))
