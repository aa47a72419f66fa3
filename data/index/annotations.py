"""The flat index of a data set: names, sizes and boxes of all images in a few arrays that all processes share.

Arrays instead of objects per image: opening takes milliseconds, and a forked worker's memory does not grow as it reads.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.config import DataConfig, DataFormat, Exif, OnError
from data.errors import DataError
from data.images.orientation import TurnRule, rule_of
from data.index.cache import (
    build_index,
    find_index,
    index_key,
    load_index,
    map_again,
    mapped_file,
    stamp_files,
)
from data.index.locate import locate
from data.index.outlines import Outlines
from data.index.source import Files, Findings, Source
from data.index.split import part_of
from data.index.validate import check_source

SINGLE_CLASS_NAME = "object"


@dataclass(frozen=True, eq=False)
class Annotations:
    """N images with M boxes of C classes. The arrays are memory-mapped and read-only.

    The boxes of image i are the rows ``offsets[i]:offsets[i + 1]``.
    """

    name_bytes: NDArray[np.uint8]  # file names relative to image_root, as the file system has them, in one row
    name_offsets: NDArray[np.int64]  # (N + 1,)
    image_ids: NDArray[np.int64]  # (N,)
    sizes: NDArray[np.int32]  # (N, 2) height, width in pixels
    offsets: NDArray[np.int64]  # (N + 1,)
    boxes_xywh: NDArray[np.float64]  # (M, 4) left, top, width, height in pixels: the very numbers of the source
    classes: NDArray[np.int32]  # (M,) in 0..C-1
    crowd: NDArray[np.bool_]  # (M,)
    areas: NDArray[np.float64]  # (M,) square pixels of the object, not of its box, where the source knows it
    category_ids: NDArray[np.int64]  # (C,) the source's ids of the classes
    outline_points: NDArray[np.float32]  # these three make up the outlines of the M boxes; with data.outlines=false
    outline_starts: NDArray[np.int64]  # they are empty
    outline_first: NDArray[np.int64]
    names: list[str]  # (C,)
    image_root: Path
    turn: TurnRule  # which images are turned upright; sizes and boxes are those of the images so turned
    skipped: list[str]  # what was left out of the source, in words; empty when nothing was
    notes: list[str]  # what was not taken as it stands, in words

    def __len__(self) -> int:
        return len(self.image_ids)

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker maps the files of the index itself: the arrays of a large set would be copied into each.
        return {key: mapped_file(value) or value for key, value in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({key: map_again(value) for key, value in state.items()})

    def file_name(self, index: int) -> str:
        """The name of an image, relative to ``image_root``; absolute where the image does not lie below."""
        name = bytes(self.name_bytes[self.name_offsets[index] : self.name_offsets[index + 1]])
        return name.decode("utf-8", "surrogateescape")

    def path(self, index: int) -> str:
        """The file of an image."""
        return os.path.join(self.image_root, self.file_name(index))  # a Path takes ten times as long to make and open

    def digest(self) -> str:
        """Changes with the images' sizes and order and with the boxes, but not with where the files are."""
        sha = hashlib.sha256()
        for column in (self.sizes, self.offsets, self.boxes_xywh, self.classes, self.crowd):
            sha.update(np.ascontiguousarray(column).data)
        return sha.hexdigest()[:16]

    @property
    def outlines(self) -> Outlines:
        """The polygons around the M objects."""
        return Outlines(self.outline_points, self.outline_starts, self.outline_first)

    def boxes_xyxy(self, index: int) -> NDArray[np.float32]:
        """All boxes (n, 4) of an image in its pixels, clipped to it."""
        return self._clipped(index, slice(self.offsets[index], self.offsets[index + 1]))

    def training_boxes(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Classes (n,) and clipped boxes_xyxy (n, 4) of an image, without crowds: those are regions, not objects."""
        rows = np.arange(self.offsets[index], self.offsets[index + 1])
        rows = rows[~self.crowd[rows]]
        return self.classes[rows], self._clipped(index, rows)

    def _clipped(self, index: int, rows: slice | NDArray[np.int64]) -> NDArray[np.float32]:
        boxes = np.array(self.boxes_xywh[rows])
        boxes[:, 2:] += boxes[:, :2]
        height, width = self.sizes[index]
        return boxes.clip(0, [width, height, width, height]).astype(np.float32)


def open_annotations(config: DataConfig, split: str) -> Annotations:
    """Opens the index of the ``train`` or ``val`` split, and builds it first where there is none for these sources.

    Any number of processes may call this at once, on one node or several. Raises ``DataError`` for missing or broken
    sources, and for bad entries unless ``data.on_error=skip``.
    """
    index_dir = Path(config.index_dir).absolute()
    try:
        files = locate(config, split)
        # The split is part of the key because only a training set must hold boxes.
        asked = [
            str(files.image_root),
            split,
            config.format,
            config.single_class,
            config.names,
            config.exif,
            config.on_error,
            config.outlines,
            config.split,
            config.split_seed,
        ]
        annotations, stamps = _open(config, split, files, index_dir, files.stamps, asked)
        if stamps and stamps != (now := _image_stamps(annotations)):
            # Sizes are those of images that have changed since: an index of its own, named by what they are now.
            annotations, _ = _open(config, split, files, index_dir, [*files.stamps, now], asked)
    except OSError as error:
        raise _unreadable(error, config) from error
    return annotations


def _open(
    config: DataConfig, split: str, files: Files, index_dir: Path, stamps: list[str], asked: list[Any]
) -> tuple[Annotations, str]:
    """The index of these sources; where sizes come from the image files, with what the file system said of those."""
    key = index_key(index_dir, files.hashed, stamps, asked)
    arrays, about = load_index(find_index(index_dir, key) or _build(config, split, files, index_dir, key))
    stamps_then = about.pop("image_stamps")
    about["turn"] = TurnRule(Exif(about["turn"][0]), about["turn"][1])
    return Annotations(**arrays, **about, image_root=files.image_root), stamps_then


def _image_stamps(annotations: Annotations) -> str:
    """Changes with every change of the image files."""
    return stamp_files([annotations.path(index) for index in range(len(annotations))]).digest


def read_annotations(config: DataConfig, split: str) -> tuple[Annotations, Findings, Findings]:
    """A split read anew from its sources, all that is wrong with them whatever ``data.on_error`` says, and its notes.

    No index is used or written; the arrays are in memory. Raises ``DataError`` where the sources as a whole are missing
    or broken.
    """
    try:
        files = locate(config, split)
        columns, about, source = _read(replace(config, on_error=OnError.skip), split, files)
    except OSError as error:
        raise _unreadable(error, config) from error
    return Annotations(**columns, **about, image_root=files.image_root), source.findings, source.notes


def _unreadable(error: OSError, config: DataConfig) -> DataError:
    root = Path(config.root).absolute()
    return DataError(
        f"{error.filename} cannot be read ({error.strerror}). fix: see to it that you may read all of {root}"
    )


def _build(config: DataConfig, split: str, files: Files, index_dir: Path, key: str) -> Path:
    """Reads and checks the sources and writes their index; returns its folder."""
    columns, about, source = _read(config, split, files)
    found = Annotations(**columns, **about, image_root=files.image_root)
    about["image_stamps"] = _image_stamps(found) if source.unsized else ""
    return build_index(index_dir, key, columns, about)


def _read(config: DataConfig, split: str, files: Files) -> tuple[dict[str, Any], dict[str, Any], Source]:
    """The columns of the index, what else it holds as plain data, and the source with its findings."""
    source = files.read()
    annotated = config.format in (DataFormat.coco, DataFormat.voc)  # with sizes that may tell how images were seen
    turn = rule_of(source, config.exif) if annotated else TurnRule(config.exif, unclear=True)
    if config.split is not None:
        source = part_of(source, split, config.split, config.split_seed)
    columns = check_source(source, split, config.on_error)
    names = list(source.categories.values())
    if config.single_class:
        columns["classes"] = np.zeros_like(columns["classes"])
        columns["category_ids"] = columns["category_ids"][:1]
        names = [SINGLE_CLASS_NAME]
    about = {"names": names, "turn": turn, "skipped": source.findings.report(), "notes": source.notes.told()}
    return columns, about, source


def check_same_classes(train: Annotations, val: Annotations) -> None:
    """Raises ``DataError`` where the two splits do not have the same classes in the same order."""
    if train.names == val.names:
        return
    if len(train.names) != len(val.names):
        problem = f"the training set has {len(train.names)} classes and the validation set {len(val.names)}"
    else:
        number = next(i for i, name in enumerate(train.names) if name != val.names[i])
        problem = (
            f"class {number} is {train.names[number]!r} in the training set and {val.names[number]!r} in the other"
        )
    raise DataError(f"{problem}. fix: set data.names to the classes of both, in order")
