"""Deviations from COCO's json are read as intended and counted in a note."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import pytest
from pycocotools.coco import COCO

from data import Annotations, DataError, OnError
from tests.data.conftest import CocoSet

ARRAYS = ("image_ids", "sizes", "offsets", "boxes_xywh", "classes", "crowd", "areas", "category_ids")
WHOLE_NUMBERS = [
    ("images", "id"), ("images", "height"), ("images", "width"), ("annotations", "image_id"),
    ("annotations", "category_id"), ("categories", "id"), ("annotations", "id"),
]  # fmt: skip
FORMS: dict[str, Callable[[int], Any]] = {"text": str, "float": float}


def assert_same(found: Annotations, expected: Annotations) -> None:
    assert found.names == expected.names and found.skipped == expected.skipped == []
    assert [found.path(i) for i in range(len(found))] == [expected.path(i) for i in range(len(expected))]
    for name in ARRAYS:
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("part", "key"), WHOLE_NUMBERS)
def test_whole_numbers_of_another_type(part: str, key: str, form: str, coco_set: CocoSet) -> None:
    expected = coco_set.open()
    assert expected.notes == []
    for record in coco_set.json[part]:
        record[key] = FORMS[form](record[key])
    found = coco_set.open()
    assert_same(found, expected)


@pytest.mark.parametrize("value", ["x", "", " 3", "0x3", "3.5", 3.5, True, None, [3]])
@pytest.mark.parametrize(("part", "key"), [pair for pair in WHOLE_NUMBERS[:-1] if pair[1] not in ("height", "width")])
def test_what_is_no_whole_number_is_refused(part: str, key: str, value: Any, coco_set: CocoSet) -> None:
    coco_set.json[part][0][key] = value
    with pytest.raises(DataError, match=rf"instances\.json is not a COCO .* at `\$\.{part}\[0\]\.{key}`\. fix: "):
        coco_set.open()


@pytest.mark.parametrize("absent", [{"width"}, {"height"}, {"width", "height"}])
def test_missing_sizes_are_those_of_the_images(absent: set[str], coco_set: CocoSet) -> None:
    expected = coco_set.open()
    for record in coco_set.json["images"][1:]:
        for key in absent:
            record[key] = None
    for key in absent:
        del coco_set.json["images"][0][key]
    found = coco_set.open()
    assert_same(found, expected)
    assert found.notes == ["images without width and height, which were read from the image files (7), first: 10.png"]

    def replaced(height: int, width: int) -> list[int]:
        assert cv2.imwrite(found.path(4), np.zeros((height, width, 3), np.uint8))
        return list(coco_set.open().sizes[4])

    assert replaced(91, 92) == [91, 92], "an image of another size is another index"
    assert replaced(93, 94) == [93, 94] and replaced(91, 92) == [91, 92]


def test_missing_sizes_of_images_that_are_none(coco_set: CocoSet) -> None:
    del coco_set.json["images"][1]["width"], coco_set.json["images"][2]["height"]
    (coco_set.root / "images" / "11.png").write_text("no picture")
    (coco_set.root / "images" / "12.png").unlink()
    with pytest.raises(DataError, match=r"missing image files \(1\), images without size \(1\)"):
        coco_set.open()
    skipped = coco_set.open(on_error=OnError.skip).skipped
    assert skipped[2].endswith("gives no size of 11.png, and the file is not an image of a known type")
    assert coco_set.open(on_error=OnError.skip).image_ids.tolist() == [10, 13, 14, 15, 16]


def test_all_of_it_at_once_scores_as_pycocotools_reads_the_plain_file(coco_set: CocoSet) -> None:
    coco_set.save()
    oracle = COCO(str(coco_set.root / "instances.json"))
    for record in coco_set.json["images"]:
        record["id"] = str(record["id"])
        del record["width"], record["height"]
    for record in coco_set.json["annotations"]:
        record["image_id"], record["category_id"] = float(record["image_id"]), str(record["category_id"])
    found = coco_set.open("val")
    assert found.image_ids.tolist() == oracle.getImgIds() and found.category_ids.tolist() == sorted(oracle.getCatIds())
    for index, number in enumerate(found.image_ids.tolist()):
        rows = slice(found.offsets[index], found.offsets[index + 1])
        expected = oracle.loadAnns(oracle.getAnnIds(imgIds=[number]))
        assert found.category_ids[found.classes[rows]].tolist() == [record["category_id"] for record in expected]
        np.testing.assert_allclose(found.boxes_xywh[rows], [r["bbox"] for r in expected] or np.zeros((0, 4)))
    assert len(found.notes) == 1
