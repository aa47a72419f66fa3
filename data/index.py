"""The flat index of a data set: names, sizes and boxes of all images in a few shared arrays.

On disk it is a folder with one ``.npy`` file per array, ``about.json`` and their CRC-32. It never
changes: other sources get another folder.
"""

import errno
import hashlib
import inspect
import json
import logging
import os
import shutil
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from data import coco, headers, layouts, recognise, remote, shapes, validate, voc, yolo
from data.config import FORMATS, DataConfig, DataFormat, Exif, OnError
from data.errors import DataError, printable
from data.geometry import Boxes
from data.io import Findings, Float64, Int64, LocatedSplit, Source, new_folder, stamp_files
from data.progress import counted

logger = logging.getLogger(__name__)

Int32 = NDArray[np.int32]
Columns = dict[str, Any]  # arrays by the name of their field
FORMAT_VERSION = 16  # raise it when the columns or the checks change
# A lost file, something else in its place, a bad sector. Other errors say nothing about the files.
DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)
UNREADABLE_FIX = "free memory or file handles (ulimit -n), or allow reading it"
ATTEMPTS = 3  # to build an index: a process may remove a damaged one just after another has rebuilt it
MOST_CLASSES = 20_000
MOST_SCORED = 100  # detections of a class on an image that COCO's metrics count
CROWDED = f"images with more than {MOST_SCORED} objects of a class, of which at most {MOST_SCORED} detections count"
MOST_NAMES = 500_000  # of training images that validation is compared with: a second
COMPARED_IMAGES = 20  # of validation, which are looked for among the training images
_opened_ahead: dict[str, "Annotations"] = {}


@dataclass(frozen=True, eq=False)
class Annotations:
    """N images with M boxes of C classes. The arrays are memory-mapped and read-only.

    The boxes of image i are the rows ``offsets[i]:offsets[i + 1]``.
    """

    name_bytes: NDArray[np.uint8]  # file names relative to image_root, in the file system's bytes, joined
    name_offsets: Int64  # (N + 1,)
    image_ids: Int64  # (N,)
    sizes: Int32  # (N, 2) height, width in pixels
    offsets: Int64  # (N + 1,)
    boxes_xywh: Float64  # (M, 4) left, top, width, height in pixels, as in the source
    classes: Int32  # (M,) in 0..C-1
    crowd: NDArray[np.bool_]  # (M,)
    areas: Float64  # (M,) square pixels of the object, if the source has them, else of its box
    category_ids: Int64  # (C,) class ids of the source
    names: list[str]  # (C,)
    image_root: remote.Place
    turn: headers.TurnRule  # which images are turned upright; sizes and boxes are those after turning
    skipped: list[str]  # sentences about entries that were left out
    notes: list[str]  # sentences about entries that were changed
    missing_files: list[str]  # images that were not there, and may be later
    num_bytes: int = 0  # of all images at an address or in tar files
    folder: Path | None = None  # of the index; None: it is only in memory

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if self.folder is None:
            return super().__reduce_ex__(protocol)
        return _mapped, (self.folder, self.image_root)  # by a worker itself

    def __len__(self) -> int:
        return len(self.image_ids)

    def file_name(self, index: int) -> str:
        """The name of an image relative to ``image_root``; absolute if it lies elsewhere."""
        name = bytes(self.name_bytes[self.name_offsets[index] : self.name_offsets[index + 1]])
        return name.decode("utf-8", "surrogateescape")

    @property
    def file_names(self) -> list[str]:
        """``file_name`` of all images."""
        return list(map(self.file_name, range(len(self))))

    def path(self, index: int) -> str:
        """The file of an image."""
        return os.path.join(self.image_root, self.file_name(index))  # ten times as fast as a Path

    def digest(self) -> str:
        """A hash of image order, image sizes and boxes; it does not depend on the folder."""
        sha = hashlib.sha256()
        for column in (self.sizes, self.offsets, self.boxes_xywh, self.classes, self.crowd):
            sha.update(np.ascontiguousarray(column).data)
        return sha.hexdigest()[:16]

    def training_boxes(self, index: int) -> tuple[Int32, Boxes]:
        """Classes (n,) and clipped boxes_xyxy (n, 4) of an image in pixels, without crowds."""
        _, classes, boxes = self.boxes_on(np.array([index]))
        return classes, boxes

    def boxes_on(self, images: Int64) -> tuple[Int64, Int32, Boxes]:
        """``training_boxes`` of images (k,) at once, after the number in 0..k-1 of each box."""
        counts = self.offsets[images + 1] - self.offsets[images]
        owners = np.repeat(np.arange(len(images)), counts)
        starts = self.offsets[images] - np.cumsum(counts) + counts
        rows = np.arange(len(owners)) + starts[owners]
        objects = ~self.crowd[rows]
        rows, owners = rows[objects], owners[objects]
        boxes = self.boxes_xywh[rows]
        boxes[:, 2:] += boxes[:, :2]
        limits = self.sizes[images[owners]][:, [1, 0, 1, 0]]
        return owners, self.classes[rows], boxes.clip(0, limits).astype(np.float32)


def open_ahead(config: DataConfig, split: str) -> Annotations:
    """``open_annotations``, whose next call returns this: to look at many files takes seconds."""
    _opened_ahead[repr((config, split))] = annotations = open_annotations(config, split)
    return annotations


def open_annotations(config: DataConfig, split: str) -> Annotations:
    """Open the index of a split, ``train``, ``val`` or ``test``; build it first if it is missing.

    Any number of processes may call this at once. Raises ``DataError``.
    """
    ahead = _opened_ahead.pop(repr((config, split)), None)
    if ahead is not None:
        return ahead
    located = locate(config, split)
    # The key has the split since only a training set must have boxes.
    options = attrgetter("format", "single_class", "names", "classes", "exif", "on_error", "split")(config)
    key = json.dumps([FORMAT_VERSION, *located.stamps, str(located.image_root), split, *options])
    folder = Path(config.index_dir).absolute() / hashlib.sha256(key.encode()).hexdigest()[:32]
    for _ in range(ATTEMPTS):
        if not folder.exists():
            build_index(folder, *_read(config, split, located)[:2])
        annotations = load_index(folder, located.image_root)
        reason = "is damaged"
        if annotations is not None:
            missing = annotations.missing_files
            if remote.is_remote(annotations.image_root):
                arrived = sum(size >= 0 for size in remote.sizes_of(missing[: remote.FEW]))
            else:
                arrived = sum(map(os.path.isfile, missing))
            if not arrived:
                return annotations
            reason = f"lacks {counted(arrived, 'image')} that arrived since"
        logger.warning("the index %s %s and will be rebuilt", folder, reason)
        with suppress(FileNotFoundError), TemporaryDirectory(dir=folder.parent) as trash:  # another moved it
            folder.rename(Path(trash) / folder.name)
    raise DataError(f"the index {folder} is damaged each time it is built", "set data.index_dir to another disk")


def build_index(folder: Path, columns: Columns, about: dict[str, Any]) -> None:
    """Write an index, unless another process finishes it first. Raises ``DataError``."""
    try:
        with new_folder(folder) as temporary:
            for name, column in columns.items():
                np.save(temporary / f"{name}.npy", column, allow_pickle=False)
            content = json.dumps({**about, "columns": list(columns)})
            (temporary / "about.json").write_text(content, encoding="utf-8")
            (temporary / "crc32").write_bytes(_checksum(temporary))
        # What killed processes left: nothing was written there for a day. new_folder names them so.
        for left in folder.parent.glob(f".*.{'[0-9a-f]' * 32}.tmp"):
            with suppress(OSError):  # another process removes it, or owns it
                if time.time() - left.stat().st_mtime > 86_400:
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
    except OSError as error:
        what = f"cannot write the index of the data set to {folder.parent} ({error.strerror})"
        raise DataError(what, "set data.index_dir to a writable folder with free space") from error


def load_index(folder: Path, image_root: remote.Place) -> Annotations | None:
    """Map the arrays of an index, read-only; ``None`` if it is damaged. Raises ``DataError``."""
    try:
        is_whole = layouts.read_file(folder / "crc32") == _checksum(folder)
        return _mapped(folder, image_root) if is_whole else None
    except OSError as error:
        if error.errno in DAMAGE:
            return None
        fix = f"{UNREADABLE_FIX}, or set data.index_dir"
        raise DataError(f"the index {folder} cannot be read ({error.strerror})", fix) from error


def _mapped(folder: Path, image_root: remote.Place) -> Annotations:
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    for name in about.pop("columns"):
        # A plain ndarray over the mapped pages: slicing np.memmap calls Python code each time.
        about[name] = np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False))
    exif, unclear = about.pop("turn")
    return Annotations(**about, turn=headers.TurnRule(Exif(exif), unclear), image_root=image_root, folder=folder)


def _checksum(folder: Path) -> bytes:
    checksum = 0
    for file in sorted(folder.glob("[!.]*.*")):
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as opened:  # pipes are empty
            while part := opened.read(2**18):  # memory for a whole file takes longer than its sum
                checksum = zlib.crc32(part, checksum)
    return b"%08x" % checksum


def read_annotations(config: DataConfig, split: str) -> tuple[Annotations, Findings, Findings]:
    """Read a split from its sources into memory; return it with all findings and notes.

    Ignores ``data.on_error`` and the index. Raises ``DataError`` for sources that are no data set.
    """
    located = locate(config, split)
    columns, about, source = _read(replace(config, on_error=OnError.skip), split, located)
    return Annotations(**columns, **about, image_root=located.image_root), source.findings, source.notes


def _read(config: DataConfig, split: str, located: LocatedSplit) -> tuple[Columns, dict[str, Any], Source]:
    """The columns of the index, its other values as plain data, and the checked source."""
    source = located.read()
    if config.format != DataFormat.shapes:
        _note_what_is_beside(config, split, source)
    if config.format in (DataFormat.yolo, DataFormat.voc):
        ids = np.array(validate.ids_by_name(source.file_names), np.int64)  # as predict.py's of the same images
        of_boxes = ids[np.searchsorted(source.image_ids, source.box_image_ids)]
        source = replace(source, image_ids=ids, box_image_ids=of_boxes)
    turn = headers.TurnRule(config.exif, unclear=True)
    if config.format not in (DataFormat.yolo, DataFormat.shapes):  # which states no sizes, or turns no image
        headers.add_sizes(source)
        turn = headers.rule_of(source, config.exif)
    if config.split is not None and split != "test":
        source = validate.select_split(source, split, config.split)
    if config.classes is not None:
        source = validate.select_classes(source, config.classes)
    if config.single_class:
        source = validate.merge_classes(source)
    columns = validate.check_source(source, split, config.on_error)
    names = list(map(printable, source.categories.values()))
    if len(names) > MOST_CLASSES:  # the scorer's tables grow with them, to 100 kB a class
        fix = "data.classes=[<names>] to choose some, or data.single_class=true"
        raise DataError(f"{source.path} has {len(names):,} classes, at most {MOST_CLASSES:,} can be scored", fix)
    left_out, notes = source.findings, source.notes
    if split != "train":
        notes.add(CROWDED, _crowded_images(source, columns), describe=source.file_names.__getitem__)
    about = {
        "names": names,
        "turn": turn,
        "skipped": [f"left out: {left_out.summary()}", *left_out.first()] if left_out.counts else [],
        "notes": [f"{kind} ({count}), first: {notes.examples[kind][0]}" for kind, count in notes.counts.items()],
        "num_bytes": source.num_bytes,
        "missing_files": source.missing_files,
    }
    return columns, about, source


def _note_what_is_beside(config: DataConfig, split: str, source: Source) -> None:
    """Note the files beside a set that no split reads, and images of tests that are trained on."""
    root, notes = Path(config.root).absolute(), source.notes
    pairs = []
    for each in ("train", "val"):
        with suppress(DataError):  # reading that split says more
            pairs += config.places(each, root)[1]
    places = [place for place, _ in pairs]
    if config.format in (DataFormat.coco, DataFormat.voc) and isinstance(source.image_root, Path):
        for kind, files in recognise.files_beside(source.image_root, source.file_names, places).items():
            notes.add(kind, files)
    if split != "train" or config.format in FORMATS:
        return
    with suppress(DataError):  # mostly there are no tests
        tests = locate(config, "test").read()
        named = {os.path.join(tests.image_root, name) for name in tests.file_names}
        trained = [name for name in source.file_names if os.path.join(source.image_root, name) in named]
        notes.add("images of tests that are trained on", trained)
    if config.format == DataFormat.coco:
        notes.add("COCO jsons that no split reads", recognise.jsons_beside(places))
        return
    if config.format == DataFormat.voc:
        places += [Path(folder) for _, folder in pairs]
    notes.add("folders of images that no split reads", recognise.folders_beside(root, places))


def _crowded_images(source: Source, columns: Columns) -> Int64:
    """The rows of images with more objects of a class than COCO's metrics count detections."""
    images = np.repeat(np.arange(len(columns["image_ids"])), np.diff(columns["offsets"]))
    pairs = images * MOST_CLASSES + columns["classes"]
    found, counts = np.unique(pairs[~columns["crowd"]], return_counts=True)
    ids = columns["image_ids"][found[counts > MOST_SCORED] // MOST_CLASSES]
    return np.flatnonzero(np.isin(source.image_ids, ids))


def check_same_classes(train: Annotations, val: Annotations) -> None:
    """Raise ``DataError`` unless both splits have the same classes in the same order."""
    for number, (name, other) in enumerate(zip_longest(train.names, val.names)):
        if name != other:
            raise DataError(
                f"class {number} is {name!r} in the training set and {other!r} in the other set, "
                f"of {len(train.names)} and {len(val.names)} classes",
                "set data.names to the classes of both, in order",
            )


def check_fills_batch(num_images: int, batch_size: int, world_size: int) -> None:
    """Raise ``DataError`` if the training images are fewer than those of a step."""
    has = f"the training set has {num_images} images, fewer than"
    if num_images < world_size:
        raise DataError(f"{has} the {world_size} ranks", "devices=1 train.batch_size=1")
    if num_images < batch_size:
        size = max(1, num_images // world_size // 5) * world_size  # five steps
        raise DataError(f"{has} train.batch_size={batch_size}", f"train.batch_size={size}")


def warn_of_shared_images(train: Annotations, val: Annotations) -> str | None:
    """Warn if images of ``val`` are in ``train`` as well.

    Paths are compared, of about MOST_NAMES images. If none is shared, a sample of ``val`` is
    compared by content with images of equal first boxes.
    """
    step = len(train) // MOST_NAMES + 1
    trained = set(map(train.path, range(0, len(train), step)))
    looked_for = range(0, len(val), len(val) // MOST_NAMES + 1)
    shared = list(filter(trained.__contains__, map(val.path, looked_for)))
    pairs, among = list(zip(shared, shared, strict=True)), len(looked_for)
    if not pairs:
        annotated = np.flatnonzero(np.diff(train.offsets))[::step]
        boxed = np.flatnonzero(np.diff(val.offsets))
        first_boxes = train.boxes_xywh[train.offsets[annotated]]
        sample = boxed[:: len(boxed) // COMPARED_IMAGES + 1].tolist()
        among = len(sample)
        for index in sample:
            equal = annotated[(first_boxes == val.boxes_xywh[val.offsets[index]]).all(axis=1)]
            for other in equal[-1:].tolist():
                pair = val.path(index), train.path(other)
                with suppress(OSError):
                    if layouts.read_file(pair[0]) == layouts.read_file(pair[1]):
                        pairs.append(pair)
    if not pairs:
        return None
    count = "at least " * (step > 1) + f"{len(pairs)} of {among}"
    images = f"validation images are training images, too, such as {' and '.join(dict.fromkeys(pairs[0]))}"
    return f"warning: {count} {images}: the metrics say nothing about new images. fix: data.split=0.1"


def locate(config: DataConfig, split: str) -> LocatedSplit:
    """Find the files of a split. Raises ``DataError`` if any is missing."""
    root = Path(config.root).absolute()
    if config.format == DataFormat.shapes:
        assert config.shapes is not None  # by DataConfig.__post_init__
        root = shapes.ensure_shapes(root, config.shapes)
    split, pairs = config.places(split, root)
    if root.is_file():
        if config.names is None and config.format == DataFormat.yolo:  # of another split of a data.yaml
            config = replace(config, names=layouts.read_set_file(root).get("names"))
        root = root.parent
    paths, folders = zip(*pairs, strict=True)
    image_root = folders[0] if len(set(folders)) == 1 else root
    if config.format == DataFormat.voc:
        return voc.locate_voc(split, pairs, Path(image_root), config.names or ())
    if config.format == DataFormat.yolo:
        return yolo.locate_yolo(config, split, pairs, root, image_root)
    path, read = paths[0], FORMATS.get(config.format)
    stamped = [str(path)]
    if read is not None:  # a plugin's, which reads the file or everything in the folder
        below = [str(file) for file in path.rglob("*") if file.is_file()]
        stamped = [inspect.getfile(read), *stamped, *sorted(below)]
    folder = remote.folder_of(image_root)
    shards = [str(image_root), *remote.shards(str(image_root)).items()] if folder != image_root else []
    stamps = [stamp_files([*stamped, str(folder)]).digest, *map(str, shards)]  # a folder's time: files came or went
    return LocatedSplit(
        stamps, folder, lambda: coco.read_coco(path, image_root, config.names, read and read(path, Path(image_root)))
    )
