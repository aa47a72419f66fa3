"""What a reader (coco.py, voc.py) takes from the files of a data set, before any check: flat columns and findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.errors import DataError

REPORTED_FINDINGS = 20
SKIP_FIX = "fix: correct the source, or set data.on_error=skip to leave such entries out"


@dataclass
class Findings:
    """Bad entries of a data set, counted by kind, with the first of them in words."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def add(self, kind: str, sentences: list[str]) -> None:
        """Records one finding per sentence; ``kind`` names them all, in the plural."""
        if sentences:
            self.counts[kind] += len(sentences)
            self.examples += sentences[: REPORTED_FINDINGS - len(self.examples)]

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


@dataclass
class Source:
    """Images and boxes in the order of their files. M boxes refer to N images by id, not by position."""

    path: Path  # the annotation file or list, for messages
    image_root: Path
    file_names: list[str]  # relative to image_root
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
