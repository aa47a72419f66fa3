"""Deviations from COCO's json are read as intended, or refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from data import DataError, coco

ARRAYS = ("image_ids", "sizes", "offsets", "boxes_xywh", "classes", "crowd", "areas", "category_ids")
WHOLE_NUMBERS = [
    ("images", "id"), ("images", "height"), ("images", "width"), ("annotations", "image_id"),
    ("annotations", "category_id"), ("categories", "id"), ("annotations", "id"),
]  # fmt: skip
FORMS: dict[str, Callable[[int], Any]] = {"text": str, "float": float}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("part", "key"), WHOLE_NUMBERS)
def test_whole_numbers_of_another_type(part, key, form, coco_set, monkeypatch) -> None:
    expected = coco_set.open()
    assert expected.notes == []
    monkeypatch.setattr(coco, "CHUNK", 4)  # as parts of a large file
    for record in coco_set.json[part]:
        record[key] = FORMS[form](record[key])
    annotations = coco_set.open()
    assert annotations.names == expected.names and annotations.skipped == []
    for name in ARRAYS:
        assert np.array_equal(getattr(annotations, name), getattr(expected, name)), name


@pytest.mark.parametrize("value", ["x", "", " 3", "0x3", "3.5", 3.5, True, None, [3]])
@pytest.mark.parametrize(("part", "key"), [pair for pair in WHOLE_NUMBERS[:-1] if pair[1] not in ("height", "width")])
def test_what_is_no_whole_number_is_refused(part, key, value, coco_set, monkeypatch) -> None:
    monkeypatch.setattr(coco, "CHUNK", 2)
    coco_set.json[part][2][key] = value
    with pytest.raises(DataError, match=rf"instances\.json is not a COCO .* at `\$\.{part}\[2\]\.{key}`\. fix: "):
        coco_set.open()
