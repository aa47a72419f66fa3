"""Fetch a public data set.

    python -m scripts.get_data coco2017 root=datasets/coco
    python -m scripts.get_data voc2007

An interrupted download continues where it stopped. Archives are checked and unpacked once.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.programs import run

    run("get_data")
    raise SystemExit

from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from conf.failures import ConfigError
from conf.schema_tools import GetDataConfig, PublicSetConfig
from data.files.bars import bar
from data.formats.download import Expected, UnreachableError, download, unpack


def get_data(config: GetDataConfig) -> Path:
    """Fetch and unpack the archives of ``config.name``; return their folder.

    Raises ConfigError for an unknown name, UnreachableError without a network.
    """
    if config.name not in config.sets:
        raise ConfigError(f"no data set is called {config.name!r}. fix: one of {', '.join(sorted(config.sets))}")
    chosen = config.sets[config.name]
    root = Path(config.root or chosen.root)
    for archive in chosen.archives:
        file_name = _file_name(archive.url)
        done = root / ".archives" / f"{file_name}.unpacked"  # holds the sum of what was unpacked
        if done.is_file() and done.read_text() == archive.md5:
            print(f"{file_name}: unpacked already")
            continue
        path = done.with_name(file_name)
        try:
            with bar(file_name) as report:
                download(archive.url, path, Expected(archive.md5), config.attempts, config.timeout_seconds, report)
        except UnreachableError as error:
            raise UnreachableError(f"{str(error).partition(' fix: ')[0]} fix: {by_hand(chosen, root)}") from error
        with bar(f"unpack {file_name}") as report:
            unpack(path, root, report)
        done.write_text(archive.md5)
        if not config.keep_archives:
            path.unlink()
    print(f"{config.name} is in {root.absolute()}")
    return root


def by_hand(chosen: PublicSetConfig, root: Path) -> str:
    """How to fetch the archives of a set on another machine, as the rest of a sentence."""
    folder = (root / ".archives").absolute()
    absent = [
        archive.url
        for archive in chosen.archives
        if not any((folder / f"{_file_name(archive.url)}{end}").exists() for end in ("", ".unpacked"))
    ]
    return (
        f"where there is a network, wget {' '.join(absent)}, copy what it fetched into {folder} and run this command "
        "again, which checks and unpacks it"
    )


def _file_name(url: str) -> str:
    return PurePosixPath(urlsplit(url).path).name
