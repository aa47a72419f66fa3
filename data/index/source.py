"""What a reader (coco.py, voc.py, yolo.py) takes from the files of a data set: flat columns and findings, unchecked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.errors import DataError, printable
from data.index.outlines import Outlines

REPORTED_FINDINGS = 20
SKIP_FIX = "fix: correct the source, or set data.on_error=skip to leave such entries out"


@dataclass
class Findings:
    """Bad entries of a data set, counted by kind, with the first of them in words."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    by_kind: dict[str, list[str]] = field(default_factory=dict)  # the first of each kind in words

    def add(self, kind: str, sentences: list[str]) -> None:
        """Records one finding per sentence; ``kind`` names them all, in the plural."""
        if sentences:
            self.counts[kind] += len(sentences)
            for first in (self.examples, self.by_kind.setdefault(kind, [])):
                first += map(printable, sentences[: REPORTED_FINDINGS - len(first)])

    def stop(self) -> None:
        """Raises the first finding, and how many there are in all, as a ``DataError``."""
        if self.examples:
            total = self.counts.total()
            more = "" if total == 1 else f" ({total} bad entries in all: {self.summary()})"
            raise DataError(f"{self.examples[0]}{more}. {SKIP_FIX}")

    def summary(self) -> str:
        """The counts, such as ``boxes without area (2), missing image files (1)``."""
        return ", ".join(f"{kind} ({count})" for kind, count in self.counts.items())

    def report(self) -> list[str]:
        """Lines for the log about what was left out; empty when nothing was."""
        return [f"left out: {self.summary()}", *self.examples] if self.counts else []

    def told(self) -> list[str]:
        """A line for each kind, with its first entry: what the log says of entries that were taken."""
        return [f"{kind} ({count}), first: {self.by_kind[kind][0]}" for kind, count in self.counts.items()]


@dataclass
class Source:
    """Images and boxes in the order of their files. M boxes refer to N images by id, not by position."""

    path: Path  # the annotation file, list or folder, for messages
    image_root: Path
    file_names: list[str]  # relative to image_root, or absolute where they do not lie below it
    image_ids: NDArray[np.int64]  # (N,)
    sizes: NDArray[np.int64]  # (N, 2) height, width
    box_image_ids: NDArray[np.int64]  # (M,)
    boxes_xywh: NDArray[np.float64]  # (M, 4) left, top, width, height in pixels
    box_category_ids: NDArray[np.int64]  # (M,)
    areas: NDArray[np.float64]  # (M,)
    crowd: NDArray[np.bool_]  # (M,)
    categories: dict[int, str]  # the classes in order: category id to name
    box_name: Callable[[int], str]  # how a message calls the box at a position, such as "annotation 17"
    findings: Findings  # entries that the reader itself could not take
    outlines: Outlines | None = None  # of the M boxes, where they were asked for and the format has them
    notes: Findings = field(default_factory=Findings)  # entries that were taken, but not as they stand
    unsized: list[int] = field(default_factory=list)  # rows of images whose sizes are those of their files, as stored


@dataclass
class Files:
    """The files of one part of a data set, found and not yet read. An index is made anew when one of them changes."""

    hashed: list[Path]  # few: known by their content
    stamps: list[str]  # of many: a digest of their names and of what the file system says about them
    image_root: Path
    read: Callable[[], Source]


def read_lines(path: Path, example: str) -> list[str]:
    """The lines of a text file in UTF-8, with or without byte order mark; bytes that are not as Python's file names.

    Raises ``DataError``, proposing ``example``, where the file is no text.
    """
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if b"\0" in content:  # also in UTF-16
        raise DataError(f"{path} is no text file in UTF-8. fix: name a list such as {example}")
    return content.decode("utf-8", "surrogateescape").splitlines()


def relative_name(path: str, root: Path) -> str:
    """An absolute path as a name relative to ``root``; as it stands where it is not below."""
    return path.removeprefix(f"{str(root).rstrip('/')}/")
