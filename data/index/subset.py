"""A few images of a data set as a set of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from data.audit.summary import objects_per_image
from data.errors import DataError
from data.index.annotations import Annotations
from data.index.outlines import flat_ranges, offsets_of


def first_images(annotations: Annotations, count: int) -> NDArray[np.int64]:
    """The first ``count`` images with an object that is no crowd. Raises DataError if too few."""
    found = np.flatnonzero(objects_per_image(annotations) > 0)[:count]
    if len(found) < count:
        raise DataError(f"train.overfit={count}: only {len(found)} training images have objects. fix: a lower number")
    return found


def images_of(annotations: Annotations, chosen: NDArray[np.int64]) -> Annotations:
    """The ``chosen`` images (n,), as often and in the order as listed, with their boxes."""
    counts = np.diff(annotations.offsets)[chosen]
    rows = flat_ranges(annotations.offsets[chosen], counts)
    lengths = np.diff(annotations.name_offsets)[chosen]
    points, starts, first = annotations.outlines.rows(rows) if len(annotations.outline_first) else annotations.outlines
    return replace(
        annotations,
        name_bytes=annotations.name_bytes[flat_ranges(annotations.name_offsets[chosen], lengths)],
        name_offsets=offsets_of(lengths),
        image_ids=annotations.image_ids[chosen],
        sizes=annotations.sizes[chosen],
        offsets=offsets_of(counts),
        boxes_xywh=annotations.boxes_xywh[rows],
        classes=annotations.classes[rows],
        crowd=annotations.crowd[rows],
        areas=annotations.areas[rows],
        outline_points=points,
        outline_starts=starts,
        outline_first=first,
    )
