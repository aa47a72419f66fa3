"""Find the files of a split from the options ``data.*``, reading lists of files at most."""

from __future__ import annotations

import inspect
from pathlib import Path

from data.config import FORMATS, DataConfig, DataFormat, SplitConfig
from data.errors import DataError
from data.formats.coco import read_coco
from data.formats.set_files import find_set_file
from data.formats.shapes import ensure_shapes
from data.formats.voc import locate_voc
from data.formats.yolo import locate_yolo
from data.index.cache import stamp_files
from data.index.source import Files


def locate(config: DataConfig, split: str) -> Files:
    """Find the files of the ``train`` or ``val`` split. Raises ``DataError`` if any is missing."""
    assert split in ("train", "val"), split
    root = _root(config)
    if config.split is not None:
        split = "train"  # both splits are parts of it
    part: SplitConfig = getattr(config, split)
    set_file = None
    if config.format == DataFormat.yolo:
        if part.annotations is None and root.is_dir():
            set_file = find_set_file(root)
        elif root.is_file():
            set_file, root = root, root.parent
    elif root.is_file():
        raise DataError(f"data.root: {root} is a file. fix: name its folder, and it as data.{split}.annotations")
    if part.annotations is None and set_file is not None:
        pairs = [(set_file, root)]
    elif part.annotations is None:
        raise DataError(f"data.root: there is no {root}. fix: name the folder of the set, or its data.yaml")
    else:
        pairs = [(root / annotations, root / images) for annotations, images in part.pairs()]
    for path, images in pairs:
        _check_paths(path, images, split, config.format in (DataFormat.yolo, DataFormat.voc, *FORMATS))
    image_roots = {images for _, images in pairs}
    image_root = image_roots.pop() if len(image_roots) == 1 else root
    if config.format == DataFormat.voc:
        return locate_voc(pairs, image_root, config.names)
    if config.format == DataFormat.yolo:
        return locate_yolo(pairs, image_root, split, config.names, config.exif)
    path = pairs[0][0]
    if config.format in FORMATS:
        return _locate_added(config, path, image_root)
    return Files([path], [], image_root, lambda: read_coco(path, image_root, config.names))


def _root(config: DataConfig) -> Path:
    """The folder of the set, drawn if it is to be."""
    root = Path(config.root).absolute()
    if not config.is_drawn:
        return root
    assert config.shapes is not None  # by DataConfig.__post_init__
    return ensure_shapes(root, config.shapes)


def _locate_added(config: DataConfig, path: Path, image_root: Path) -> Files:
    """The files of a plugin's format: ``path`` itself, or all in it."""
    read = FORMATS[config.format]
    below = sorted(str(file) for file in path.rglob("*") if file.is_file()) if path.is_dir() else []
    stamps = [*below, stamp_files(below).digest] if below else []
    hashed = [Path(inspect.getfile(read)), *([] if path.is_dir() else [path])]
    return Files(hashed, stamps, image_root, lambda: read_coco(path, image_root, config.names, read(path, image_root)))


def _check_paths(path: Path, image_root: Path, split: str, may_be_folder: bool) -> None:
    for place, key in ((path, f"data.{split}.annotations"), (image_root, f"data.{split}.images")):
        if not place.exists():
            fix = f"fix: set data.root to the folder of the data set, or {key}"
            more = ", or data.split=0.1 to take a tenth of the training images" if split == "val" else ""
            raise DataError(f"{key}: there is no {place}. {fix}{more}")
    if not (path.is_file() or (may_be_folder and path.is_dir())):
        raise DataError(f"data.{split}.annotations: {path} is not a file. fix: name the annotation file itself")
    if not image_root.is_dir():
        raise DataError(f"data.{split}.images: {image_root} is not a folder. fix: name the folder of the images")
