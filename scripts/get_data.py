"""Fetch a public data set.

    python -m scripts.get_data coco2017 root=datasets/coco
    python -m scripts.get_data voc2007

Archives are verified, and unpacked once.
"""

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.cli.program import start

    raise SystemExit(start("get_data"))

import filecmp
import shutil
import tarfile
import zipfile
from pathlib import Path

from conf import ConfigError, schema
from data.errors import DataError
from data.io import download
from data.progress import log

_COCO, _VOC = "http://images.cocodataset.org", "http://host.robots.ox.ac.uk/pascal/VOC"
FOLDERS = {"coco2017": "datasets/coco", "voc2007": "datasets", "voc2012": "datasets"}  # to unpack into
SETS = {  # the MD5 of each archive by its address
    "coco2017": {  # 118,287 + 5,000 images, 19 GB, for data=coco
        f"{_COCO}/annotations/annotations_trainval2017.zip": "f4bbac642086de4f52a3fdda2de5fa2c",
        f"{_COCO}/zips/val2017.zip": "442b8da7639aecaf257c1dceb8ba8c80",
        f"{_COCO}/zips/train2017.zip": "cced6f7f71b7629ddf16f17bbcfab6b2",
    },
    "voc2007": {  # 9,963 images, 0.9 GB; with voc2012 for data=voc
        f"{_VOC}/voc2007/VOCtrainval_06-Nov-2007.tar": "c52e279531787c972589f7e41ab4ae64",
        f"{_VOC}/voc2007/VOCtest_06-Nov-2007.tar": "b6e924de25625d8de591ea690078ad9f",
    },
    "voc2012": {  # 17,125 images, 1.9 GB
        f"{_VOC}/voc2012/VOCtrainval_11-May-2012.tar": "6cd6e144f989b92b3379bac3b3de84fd",
    },
}


def get_data(config: schema.GetDataConfig) -> Path:
    """Fetch and unpack the archives of ``config.name``; return their folder.

    Raises ConfigError for an unknown name, DataError if an archive cannot be fetched.
    """
    if config.name not in SETS:
        raise ConfigError(f"no data set is called {config.name!r}", f"one of {', '.join(SETS)}")
    root = Path(config.root or FOLDERS[config.name])
    for url, md5 in SETS[config.name].items():
        path = root / ".archives" / url.rpartition("/")[2]
        done = path.with_name(f"{path.name}.unpacked")
        if done.is_file():
            log.info(f"{path.name}: already unpacked")
            continue
        download(url, path, f"md5:{md5}")
        log.info(f"{path.name}: unpacking")
        beside = path.with_name(f"{path.name}.files")
        try:
            shutil.rmtree(beside, ignore_errors=True)
            shutil.unpack_archive(path, beside, filter=None if path.suffix == ".zip" else "data")
            _move_into(root, beside)
        except (shutil.ReadError, tarfile.TarError, zipfile.BadZipFile, OSError) as error:
            raise DataError(f"{path} cannot be unpacked ({error})", f"free space in {root}, or unpack it") from error
        done.touch()
        shutil.rmtree(beside)
        path.unlink()
    log.info(f"{config.name} is in {root.absolute()}")
    return root


def _move_into(root: Path, unpacked: Path) -> None:
    """Move all files to their places below ``root``. Raises DataError for one of other content."""
    for file in sorted(path for path in unpacked.rglob("*") if path.is_file()):
        target = root / file.relative_to(unpacked)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            file.rename(target)
        elif not filecmp.cmp(file, target, shallow=False):
            raise DataError(f"{target} is there already, with other content", "root=<a new folder>")
