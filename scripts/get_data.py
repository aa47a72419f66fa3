"""Fetch a public data set.

    python -m scripts.get_data coco2017 root=datasets/coco
    python -m scripts.get_data voc2007

Downloads go on where they stopped, are checked, and are unpacked once.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.programs import run

    run("get_data")
    raise SystemExit

from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from tqdm import tqdm

from conf.failures import ConfigError
from conf.schema_tools import GetDataConfig, PublicSetConfig
from data.formats.download import UnreachableError, download, unpack


def get_data(config: GetDataConfig) -> Path:
    """Fetch and unpack the archives of ``config.name``; returns the folder that they are in."""
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
        try:
            with _Bar(file_name, "B") as bar:
                download(archive.url, path, archive.md5, config.attempts, config.timeout_seconds, bar.report)
        except UnreachableError as error:
            raise UnreachableError(f"{str(error).partition(' fix: ')[0]} fix: {by_hand(chosen, root)}") from error
        with _Bar(f"unpack {file_name}", " files") as bar:
            unpack(path, root, bar.report)
        done.write_text(archive.md5)
        if not config.keep_archives:
            path.unlink()
    print(f"{config.name} is in {root.absolute()}")
    return root


def by_hand(chosen: PublicSetConfig, root: Path) -> str:
    """How to fetch the archives of a set on another machine, as the rest of a sentence."""
    folder = (root / ".archives").absolute()
    absent = [url for url in (archive.url for archive in chosen.archives) if not _is_there(url, folder)]
    return (
        f"where there is a network, wget {' '.join(absent)}, copy what it fetched into {folder} and run this command "
        "again, which checks and unpacks it"
    )


def _is_there(url: str, folder: Path) -> bool:
    name = PurePosixPath(urlsplit(url).path).name
    return (folder / name).exists() or (folder / f"{name}.unpacked").exists()


class _Bar:
    """A progress bar that is told totals, not steps."""

    def __init__(self, name: str, unit: str) -> None:
        self._bar = tqdm(desc=name, unit=unit, unit_scale=True, mininterval=1.0)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def report(self, done: int, total: int) -> None:
        """``done`` of ``total`` units are finished; a total of 0 is unknown."""
        self._bar.total = total or None
        self._bar.update(done - self._bar.n)
