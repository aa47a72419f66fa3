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
from typing import NamedTuple
from urllib.parse import urlsplit

from conf.failures import ConfigError
from conf.schema_tools import GetDataConfig
from data.download import download, unpack


class PublicSet(NamedTuple):
    """A public data set: the folder to unpack into, and the MD5 of each archive by its address."""

    root: str
    archives: dict[str, str]


_COCO, _VOC = "http://images.cocodataset.org", "http://host.robots.ox.ac.uk/pascal/VOC"
SETS = {
    # 118,287 + 5,000 images, 19 GB, for data=coco
    "coco2017": PublicSet(
        "datasets/coco",
        {
            f"{_COCO}/annotations/annotations_trainval2017.zip": "f4bbac642086de4f52a3fdda2de5fa2c",
            f"{_COCO}/zips/val2017.zip": "442b8da7639aecaf257c1dceb8ba8c80",
            f"{_COCO}/zips/train2017.zip": "cced6f7f71b7629ddf16f17bbcfab6b2",
        },
    ),
    # 9,963 images, 0.9 GB; with voc2012 for data=voc
    "voc2007": PublicSet(
        "datasets",
        {
            f"{_VOC}/voc2007/VOCtrainval_06-Nov-2007.tar": "c52e279531787c972589f7e41ab4ae64",
            f"{_VOC}/voc2007/VOCtest_06-Nov-2007.tar": "b6e924de25625d8de591ea690078ad9f",
        },
    ),
    # 17,125 images, 1.9 GB
    "voc2012": PublicSet(
        "datasets", {f"{_VOC}/voc2012/VOCtrainval_11-May-2012.tar": "6cd6e144f989b92b3379bac3b3de84fd"}
    ),
}


def get_data(config: GetDataConfig) -> Path:
    """Fetch and unpack the archives of ``config.name``; return their folder.

    Raises ConfigError for an unknown name, DataError where an archive cannot be fetched.
    """
    if config.name not in SETS:
        raise ConfigError(f"no data set is called {config.name!r}. fix: one of {', '.join(SETS)}")
    chosen = SETS[config.name]
    root = Path(config.root or chosen.root)
    for url, md5 in chosen.archives.items():
        file_name = PurePosixPath(urlsplit(url).path).name
        done = root / ".archives" / f"{file_name}.unpacked"  # holds the sum of what was unpacked
        if done.is_file() and done.read_text() == md5:
            print(f"{file_name}: unpacked already")
            continue
        path = done.with_name(file_name)
        download(url, path, f"md5:{md5}")
        print(f"{file_name}: unpacking")
        unpack(path, root)
        done.write_text(md5)
        if not config.keep_archives:
            path.unlink()
    print(f"{config.name} is in {root.absolute()}")
    return root
