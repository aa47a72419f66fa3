"""SHA-256 of the image files and labels of a set, by which a changed one is found and named."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from data.files.reading import CHUNK, in_chunks
from data.index.annotations import Annotations


def hash_set(annotations: Annotations, shown: bool = False) -> tuple[list[tuple[str, str, str]], str]:
    """File name, digest of the bytes and digest of the labels of each image, and one of the set.

    They are SHA-256 in hexadecimal, of an image's labels 16 digits, of an unreadable file "". That
    of the set also covers class names, ids and outlines. With ``shown`` a terminal shows a bar, and
    threads read slow disks.
    """
    paths = [annotations.path(index) for index in range(len(annotations))]
    chunks = [paths[start : start + CHUNK] for start in range(0, len(paths), CHUNK)]
    hashed = in_chunks(_hash_files, paths, "hashing images") if shown else map(_hash_files, chunks)
    files = [digest for chunk in hashed for digest in chunk]
    names = [annotations.file_name(index) for index in range(len(annotations))]
    labels = [_hash_labels(annotations, index) for index in range(len(annotations))]
    rows = list(zip(names, files, labels, strict=True))
    whole = hashlib.sha256(repr((annotations.names, rows)).encode("utf-8", "surrogateescape"))
    for column in (annotations.image_ids, annotations.category_ids, *annotations.outlines):
        whole.update(np.ascontiguousarray(column).data)
    return rows, whole.hexdigest()


def _hash_files(paths: Sequence[str]) -> list[str]:
    return [hash_file(path) for path in paths]  # with data.on_error=skip a set may name missing ones


def hash_file(path: str | Path) -> str:
    """The SHA-256 of a file's bytes; "" if it is missing or unreadable."""
    with suppress(OSError), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
    return ""


def _hash_labels(annotations: Annotations, index: int) -> str:
    rows = slice(annotations.offsets[index], annotations.offsets[index + 1])
    columns = (annotations.boxes_xywh, annotations.classes, annotations.crowd, annotations.areas)
    content = [annotations.sizes[index].tobytes(), *(column[rows].tobytes() for column in columns)]
    return hashlib.sha256(b"".join(content)).hexdigest()[:16]
