"""Fetch a public data set.

    python -m scripts.get_data coco2017 root=datasets/coco
    python -m scripts.get_data voc2007

Archives are checked and unpacked once.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.programs import run

    run("get_data")
    raise SystemExit

from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from conf.failures import ConfigError
from conf.schema_tools import GetDataConfig
from data.download import download, unpack


def get_data(config: GetDataConfig) -> Path:
    """Fetch and unpack the archives of ``config.name``; return their folder.

    Raises ConfigError for an unknown name, DataError where an archive cannot be fetched.
    """
    if config.name not in config.sets:
        raise ConfigError(f"no data set is called {config.name!r}. fix: one of {', '.join(sorted(config.sets))}")
    chosen = config.sets[config.name]
    root = Path(config.root or chosen.root)
    for archive in chosen.archives:
        file_name = PurePosixPath(urlsplit(archive.url).path).name
        done = root / ".archives" / f"{file_name}.unpacked"  # holds the sum of what was unpacked
        if done.is_file() and done.read_text() == archive.md5:
            print(f"{file_name}: unpacked already")
            continue
        path = done.with_name(file_name)
        download(archive.url, path, f"md5:{archive.md5}")
        print(f"{file_name}: unpacking")
        unpack(path, root)
        done.write_text(archive.md5)
        if not config.keep_archives:
            path.unlink()
    print(f"{config.name} is in {root.absolute()}")
    return root
