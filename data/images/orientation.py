"""Decide which images of a set their EXIF tag turns upright, and turn them.

An image is turned unless its annotated size fits only the stored pixels. Tags 2 to 4 and squares
keep their size, so it cannot decide there. Then the majority of the set's other tagged images
decides; without any, the image is turned.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from data.config import Exif
from data.files.headers import Header, read_headers
from data.files.reading import in_chunks
from data.geometry import Image, Size
from data.index.source import Source

TURNED = "images turned upright by their EXIF tag"
STORED = "images with an EXIF tag that are read as stored, since their sizes are annotated so"
IGNORED = "images with an EXIF tag that data.exif=ignore passes over"
NEITHER = "images with an EXIF tag whose annotated size is neither that of the turned nor that of the stored image"

FLIPS = {2: 1, 3: -1, 4: 0, 6: 1, 7: -1, 8: 0}  # OpenCV's code, by orientation; 5 to 8 are transposed first
_INVERSE = (0, 1, 2, 3, 4, 5, 8, 7, 6)  # the orientation that undoes each one


class TurnRule(NamedTuple):
    """Which images of a set are turned."""

    exif: Exif
    unclear: bool  # whether to turn images whose annotated size does not decide

    def orientation(self, header: Header, size: Size) -> int:
        """Return the EXIF orientation to apply, given the annotated ``size`` (height, width)."""
        if self.exif == Exif.ignore:
            return 1
        turned = header.size(header.orientation) == size if header.changes_size else self.unclear
        return header.orientation if turned else 1


def turn_decoded(image: Image, header: Header, orientation: int) -> Image:
    """Turn an image (h, w, 3), decoded with IGNORE_ORIENTATION, by an EXIF ``orientation``."""
    if header.kind == "TIFF":  # OpenCV always applies its tag
        orientation = 1 if orientation == header.orientation else _INVERSE[header.orientation]
    if orientation > 4:
        image = np.asarray(cv2.transpose(image), dtype=np.uint8)
    flip = FLIPS.get(orientation)
    return image if flip is None else np.asarray(cv2.flip(image, flip), dtype=np.uint8)


def rule_of(source: Source, exif: Exif) -> TurnRule:
    """Derive the rule of a set from its image headers and annotated sizes; fills ``source.notes``.

    Images without an annotated size get their size after turning.
    """
    paths = [os.path.join(source.image_root, name) for name in source.file_names]
    headers = np.concatenate([np.zeros((0, 3), dtype=np.int64), *in_chunks(read_headers, paths, "reading EXIF tags")])
    stored, tagged = headers[:, :2], headers[:, 2] > 1
    turned = np.where(headers[:, 2:] > 4, stored[:, ::-1], stored)
    fits_stored, fits_turned = ((sizes == source.sizes).all(axis=1) for sizes in (stored, turned))
    unsized = np.zeros(len(headers), dtype=bool)
    unsized[source.unsized] = True
    unclear = tagged & ((fits_stored & fits_turned) | unsized)
    says_stored, says_turned = tagged & ~unclear & fits_stored, tagged & ~unclear & fits_turned
    rule = TurnRule(exif, unclear=bool(says_turned.sum() >= says_stored.sum()))

    def note(kind: str, which: NDArray[np.bool_]) -> None:
        source.notes.add(kind, [source.file_names[row] for row in np.flatnonzero(which).tolist()])

    note(NEITHER, tagged & ~unclear & ~fits_stored & ~fits_turned)
    if exif == Exif.ignore:
        note(IGNORED, tagged)
        return rule
    note(TURNED, says_turned | (unclear & rule.unclear))
    note(STORED, says_stored | (unclear & (not rule.unclear)))
    if rule.unclear:
        source.sizes = np.where((unsized & tagged)[:, None], turned, source.sizes)
    return rule
