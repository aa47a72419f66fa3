"""Take a validation set from the training images where a data set has none."""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from data.errors import DataError
from data.index.source import Source


def is_for_validation(file_names: Sequence[str], share: float) -> NDArray[np.bool_]:
    """Which images (N,) are for validation: about ``share``, by a hash of the name.

    Names count without folder and suffix. So an image stays in its split when others come, go or
    move, and in any order or format of the list.
    """
    stems = (os.path.splitext(os.path.basename(name))[0] for name in file_names)
    # macOS composes accents differently.
    texts = (f"0 {unicodedata.normalize('NFC', stem)}".encode("utf-8", "surrogateescape") for stem in stems)
    hashes = [int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) for text in texts]
    return np.array([value < share * 2**64 for value in hashes], dtype=bool)


def part_of(source: Source, split: str, share: float) -> Source:
    """The ``train`` or ``val`` part of a source, with a note that counts the latter.

    Raises ``DataError`` where a part would be empty.
    """
    for_val = is_for_validation(source.file_names, share)
    total, count = len(for_val), int(for_val.sum())
    if total and count in (0, total):
        raise DataError(
            f"data.split={share:g} takes {count} of the {total} images of {source.path}"
            " for validation. fix: another share, or give files of different names (folders do not count)"
        )
    kept = for_val if split == "val" else ~for_val
    elsewhere = np.isin(source.box_image_ids, source.image_ids[~kept])
    elsewhere &= ~np.isin(source.box_image_ids, source.image_ids[kept])  # the checks report ids used twice
    rows, name_of = np.flatnonzero(~elsewhere), source.box_name
    kind = f"training images out of {total} that data.split={share:g} takes for validation by name, ignoring data.val"
    source.notes.add(kind, [source.file_names[row] for row in np.flatnonzero(for_val).tolist()])
    return replace(
        source,
        file_names=[source.file_names[row] for row in np.flatnonzero(kept).tolist()],
        image_ids=source.image_ids[kept],
        sizes=source.sizes[kept],
        box_image_ids=source.box_image_ids[rows],
        boxes_xywh=source.boxes_xywh[rows],
        box_category_ids=source.box_category_ids[rows],
        areas=source.areas[rows],
        crowd=source.crowd[rows],
        unsized=np.flatnonzero(np.isin(np.flatnonzero(kept), source.unsized)).tolist(),
        box_name=lambda row: name_of(int(rows[row])),
    )
