"""Find images and labels of a YOLO set from a data.yaml, an obj.data, a list or a folder."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from data.errors import DataError, shown
from data.files.headers import IMAGE_SUFFIXES
from data.files.text import read_lines
from data.formats.set_files import (
    SET_SUFFIXES,
    YAML_SUFFIXES,
    darknet_folders,
    darknet_options,
    darknet_path,
    load_yaml,
    names_of_yaml,
)
from data.index.cache import Stamps, stamp_files
from data.index.classes import read_names
from data.index.validate import existing

IMAGE_FOLDERS = ("images", "JPEGImages")  # the usual ones, with a folder "labels" beside them
SPLIT_KEYS = {"train": ("train",), "val": ("val", "valid", "validation")}  # of a data.yaml or obj.data


@dataclass
class Found:
    """The images of a source."""

    groups: list[list[str]] = field(default_factory=list)  # absolute paths, by the folder or list they come from
    names: list[str] | None = None  # of the classes, if known
    read: list[Path] = field(default_factory=list)  # the files read to find all this


def find_images(place: Path, base: Path, split: str) -> Found:
    """The images of ``place``: a data.yaml, an obj.data, a list of paths or a folder.

    Paths in a list are relative to ``base`` (Darknet) or to the list's own folder (COCO's YOLO
    lists), whichever makes more of them exist. Raises ``DataError`` for anything else.
    """
    if place.is_dir():
        return Found([_images_below(place)])
    if place.suffix.lower() in YAML_SUFFIXES:
        return _from_yaml(place, base, split)
    if place.suffix.lower() == ".data":
        return _from_darknet(place, base, split)
    return Found([_listed(place, [base])], read=[place])


def find_labels(images: list[str]) -> tuple[list[str], Stamps]:
    """The path of each image's label file, whether or not it exists, and the stamps of these.

    Labels lie in ``labels`` instead of the last ``images`` in the image's path, in ``labels``
    instead of ``JPEGImages``, or beside the image. The first of these that finds any label file
    holds for the whole group; if none does, the very first.
    """
    first = None
    for folder in (*IMAGE_FOLDERS, None):
        labels = _label_paths(images, folder)
        if first is None or labels != first[0]:
            found = labels, stamp_files(labels)
            if found[1].exists.any():
                return found
            first = first or found
    assert first is not None
    return first


def _label_paths(images: list[str], folder: str | None) -> list[str]:
    """The label files if they lie in ``labels`` instead of ``folder``; ``None``: beside images."""
    folders: dict[str, str] = {}  # of images to that of their labels
    labels = []
    for image in images:
        parent, _, name = image.rpartition("/")
        if parent not in folders:
            parts = parent.split("/")
            if folder in parts:
                parts[len(parts) - 1 - parts[::-1].index(folder)] = "labels"
            folders[parent] = "/".join(parts)
        labels.append(f"{folders[parent]}/{name.rpartition('.')[0] or name}.txt")
    return labels


def _images_below(folder: Path) -> list[str]:
    """All images in a folder and below, by suffix, without hidden ones, sorted by path."""

    def stop(error: OSError) -> None:
        raise error

    found, visited = [], set()
    for parent, folders, files in os.walk(os.path.normpath(folder), onerror=stop, followlinks=True):
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in visited:  # a link to a folder above
            folders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            f"{parent}/{name}"
            for name in files
            if name[name.rfind(".") :].lower() in IMAGE_SUFFIXES and not name.startswith(".")
        ]
    if not found:
        raise DataError(f"{folder} holds no images. fix: name a folder that does ({' '.join(sorted(IMAGE_SUFFIXES))})")
    return sorted(found)


def _listed(path: Path, starts: list[Path]) -> list[str]:
    """The images of a list with one path per line.

    Relative paths start at the one of ``starts``, or the list's own folder, where most exist.
    """
    lines = [line.strip() for line in read_lines(path, "train.txt, with one image path per line")]
    lines = [line.replace("\\", "/") for line in lines if line]  # it may be written on Windows
    if not lines:
        raise DataError(f"{path} lists no image. fix: write one path per line, or name another list")
    bases = list(dict.fromkeys((*starts, path.parent)))
    if len(bases) > 1 and not all(line.startswith("/") for line in lines):
        bases.sort(key=lambda base: -int(existing(base, lines).sum()))  # stable: of equals the first
    return [os.path.normpath(os.path.join(bases[0], line)) for line in lines]


def _from_darknet(path: Path, base: Path, split: str) -> Found:
    """The images of the list that Darknet's obj.data names for a split, and its class names."""
    options = darknet_options(path)
    entry = next((options[key] for key in SPLIT_KEYS[split] if options.get(key)), None)
    if entry is None:
        raise _no_images(path, "valid" if split == "val" else split)
    place = darknet_path(entry, path, base)
    if place.is_dir():
        found = Found([_images_below(place)], read=[path])
    else:
        found = Found([_listed(place, darknet_folders(path, base))], read=[path, place])
    if "names" in options:
        names_file = darknet_path(options["names"], path, base)
        found.names, _ = read_names(names_file)
        found.read.append(names_file)
        count = options.get("classes", len(found.names))
        if str(count) != str(len(found.names)):
            names = f"{names_file} holds {len(found.names)} names"
            raise DataError(f"{path} has classes={count}, but {names}. fix: correct one of them")
    return found


def _no_images(path: Path, key: str) -> DataError:
    more = "" if key == "train" else ", or data.split=0.1 to take a tenth of the training images"
    return DataError(f"{path} names no images under {key!r}. fix: give it a folder or a list there{more}")


def _from_yaml(path: Path, base: Path, split: str) -> Found:
    """The images that a data.yaml names for a split, by its keys train, val, path and names.

    train and val hold a folder, a list file, or a YAML list of these. A relative ``path`` or entry
    starts at the file's own folder or else at ``base``; ``path`` also at the current folder, at its
    ``datasets`` or at the one beside it, as in Ultralytics' programs. Roboflow writes
    "../train/images" for a folder beside the file, so entries are also tried without "../".
    ``download`` is neither fetched nor run.
    """
    content = load_yaml(path)
    if "kpt_shape" in content:
        raise DataError(f"{path} is for key points (kpt_shape), whose rows are no boxes. fix: name a set for detection")
    entries = next((content[key] for key in SPLIT_KEYS[split] if content.get(key)), None)
    entries = entries if isinstance(entries, list) else [entries]
    if not all(isinstance(entry, str) for entry in entries):
        raise _no_images(path, split)
    start = content.get("path") or ""
    if not isinstance(start, str):
        raise DataError(f"{path} has path={shown(start)}. fix: make it a folder")
    folders = [path.parent, base, *(Path.cwd() / below for below in ("", "datasets", "../datasets") if start)]
    starts = list(dict.fromkeys([*(folder / start for folder in folders), path.parent, base]))
    found = Found(names=names_of_yaml(content, path), read=[path])
    for entry in entries:
        short = re.sub(r"^(\.\./)+", "", entry)
        tried = dict.fromkeys(Path(os.path.normpath(root / name)) for name in (entry, short) for root in starts)
        place = next((candidate for candidate in tried if candidate.exists()), None)
        if place is None or place.suffix.lower() in SET_SUFFIXES:
            looked = ", ".join(str(candidate) for candidate in tried)
            raise DataError(
                f"{path} names {entry} for {split!r}, but there is no such list or folder (looked for {looked}). "
                "fix: correct its path, or get the images first"
            )
        part = find_images(place, next(filter(Path.is_dir, starts)), split)
        found.groups += part.groups
        found.read += part.read
    return found
