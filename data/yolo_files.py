"""Finds the images of a YOLO set, by its data.yaml, a list of paths or a folder, and the label file of each."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from data.checks import existing
from data.errors import DataError, shown
from data.headers import IMAGE_SUFFIXES
from data.index_cache import Stamps, stamp_files
from data.source import read_lines

YAML_SUFFIXES = (".yaml", ".yml")
IMAGE_FOLDERS = ("images", "JPEGImages")  # the usual ones, which have a folder "labels" beside them
YAML_KEYS = {"train": ("train",), "val": ("val", "validation")}


@dataclass
class Found:
    """The images that a source stands for."""

    groups: list[list[str]] = field(default_factory=list)  # absolute paths, by the folder or list that names them
    names: list[str] | None = None  # of the classes, where the source knows them
    read: list[Path] = field(default_factory=list)  # the files that were read to find all this


def find_images(place: Path, base: Path, split: str) -> Found:
    """The images that ``place`` stands for: a data.yaml, a list of paths or a folder.

    Paths of a list start at ``base`` or at the list's own folder, where more of them exist; Darknet's are of the first
    kind, those of COCO's YOLO lists of the second. Raises ``DataError`` for what is none of this.
    """
    if place.is_dir():
        return Found([_images_below(place)])
    if place.suffix.lower() in YAML_SUFFIXES:
        return _from_yaml(place, base, split)
    return Found([_listed(place, base)], read=[place])


def find_labels(images: list[str]) -> tuple[list[str], Stamps]:
    """The label file of each image of a group, whether or not there is one, and what the file system says of them.

    It lies in a folder ``labels`` where the path of the image has ``images`` (the last part of that name; else
    ``JPEGImages``), or else beside the image: the first of these ways that leads to any label file counts for the whole
    group, and the very first where none does.
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


def no_labels(image: str) -> str:
    """Where a label file was looked for, in words."""
    places = dict.fromkeys(_label_paths([image], folder)[0] for folder in (*IMAGE_FOLDERS, None))
    return f"first: {image}, looked for {' and '.join(places)}"


def _label_paths(images: list[str], folder: str | None) -> list[str]:
    """Where the label files are if they lie in ``labels`` instead of ``folder``; ``None``: beside the images."""
    folders: dict[str, str] = {}  # of images: of their labels
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
    """All files with the suffix of an image in a folder and below, hidden ones aside, sorted by path."""

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


def _listed(path: Path, base: Path) -> list[str]:
    """The images of a list, one path a line."""
    lines = [line.strip() for line in read_lines(path, "train.txt, with one image path a line")]
    lines = [line for line in lines if line]
    if not lines:
        raise DataError(f"{path} lists no image. fix: write one path a line, or name another list")
    bases = list(dict.fromkeys((base, path.parent)))
    if len(bases) > 1 and not all(line.startswith("/") for line in lines):
        bases.sort(key=lambda root: -int(existing(root, lines).sum()))  # stable: where both are as good, the first
    return [os.path.normpath(os.path.join(bases[0], line)) for line in lines]


def _from_yaml(path: Path, base: Path, split: str) -> Found:
    """The images that a data.yaml names for a split: keys train, val (folders, lists, or several of them), path, names.

    Where ``path`` or an entry is relative, it starts at the file's own folder or else at ``base``. Exports of Roboflow
    write "../train/images" for a folder beside the file: such an entry is looked for without "../", too.
    """
    content = _load(path)
    if "kpt_shape" in content:
        raise DataError(f"{path} is for key points (kpt_shape), whose rows are no boxes. fix: name a set for detection")
    entries = next((content[key] for key in YAML_KEYS[split] if content.get(key)), None)
    entries = entries if isinstance(entries, list) else [entries]
    if not all(isinstance(entry, str) for entry in entries):
        raise DataError(f"{path} names no images under {split!r}. fix: give it a folder or a list there")
    start = content.get("path") or ""
    if not isinstance(start, str):
        raise DataError(f"{path} has path={shown(start)}. fix: make it a folder")
    starts = list(dict.fromkeys([path.parent / start, base / start, path.parent, base]))
    found = Found(names=_names(content, path), read=[path])
    for entry in entries:
        short = entry.removeprefix("../")
        tried = dict.fromkeys(Path(os.path.normpath(root / name)) for name in (entry, short) for root in starts)
        place = next((candidate for candidate in tried if candidate.exists()), None)
        if place is None or place.suffix.lower() in YAML_SUFFIXES:
            looked = ", ".join(str(candidate) for candidate in tried)
            raise DataError(
                f"{path} names {entry} for {split!r}, but there is no such list or folder (looked for {looked}). "
                "fix: correct its path"
            )
        part = find_images(place, next(filter(Path.is_dir, starts)), split)
        found.groups += part.groups
        found.read += part.read
    return found


def _load(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: such as a date with a 13th month
        raise DataError(f"{path} is not valid YAML ({' '.join(str(error).split())}). fix: correct it") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds no keys. fix: name a data.yaml with train, val and names")
    return content


def _names(content: dict[str, Any], path: Path) -> list[str] | None:
    """The class names: a list, or a dictionary with the keys 0, 1, ..."""
    names = content.get("names")
    if names is None:
        return None
    if isinstance(names, dict):
        if sorted(names, key=str) != sorted(range(len(names)), key=str):
            raise DataError(
                f"{path}: the keys of names are {shown(list(names))}. fix: number them from 0 on, none left out"
            )
        names = [names[number] for number in range(len(names))]
    if not isinstance(names, list) or not names:
        raise DataError(f"{path} has names={shown(names)}. fix: make it a list with at least one class")
    for name in names:
        # YAML takes yes, no, on and off for truth values.
        if isinstance(name, bool) or not isinstance(name, str | int | float):
            raise DataError(f"{path} has the class name {shown(name)}. fix: make it a text, in quotes")
    texts = [str(name) for name in names]
    if len(set(texts)) < len(texts):
        twice = next(name for name in texts if texts.count(name) > 1)
        raise DataError(f"{path} has two classes of the name {twice!r}. fix: give each its own name")
    count = content.get("nc", len(texts))
    if count != len(texts):
        raise DataError(f"{path} has nc={shown(count)}, but {len(texts)} names. fix: correct one of them")
    return texts
