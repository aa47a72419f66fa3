"""scripts/get_data.py from the command line to the files, against a local server."""

import hashlib
import io
import zipfile

import pytest

from conf import ConfigError
from conf.cli.program import PROGRAMS
from conf.compose import compose
from conf.schema import GetDataConfig
from data import DataError
from scripts.get_data import SETS, get_data
from tests.file_server import serving


def test_a_set_is_fetched_unpacked_and_not_fetched_again(tmp_path, monkeypatch, capsys) -> None:
    root, content = tmp_path / "root", io.BytesIO()
    with zipfile.ZipFile(content, "w") as zipped:
        zipped.writestr("pictures/1.txt", "one")
    with serving(content.getvalue()) as server:
        archives = {f"{server.url}/pictures.zip": hashlib.md5(server.content).hexdigest()}
        monkeypatch.setitem(SETS, "voc2007", archives)
        arguments = PROGRAMS["get_data"].prepared(["voc2007", f"root={root}"])
        config = compose("get_data", GetDataConfig, arguments)
        (root / "pictures").mkdir(parents=True)
        (root / "pictures" / "1.txt").write_text("mine")
        with pytest.raises(DataError, match=r"1\.txt is there already.* fix: root="):
            get_data(config)
        assert (root / "pictures" / "1.txt").read_text() == "mine"
        (root / "pictures" / "1.txt").unlink()
        assert get_data(config) == root
    assert (root / "pictures" / "1.txt").read_text() == "one" and not [*root.rglob("*.zip")]
    capsys.readouterr()
    get_data(config)  # the server is gone
    assert capsys.readouterr().out.count("already unpacked") == 1
    with pytest.raises(ConfigError, match=r"no data set is called 'coco'\. fix: one of coco2017, voc2007, voc2012"):
        get_data(compose("get_data", GetDataConfig, ["name=coco"]))
