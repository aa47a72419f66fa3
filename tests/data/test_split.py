"""``data.split``: a validation set that depends on the images' names only."""

import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data import Annotations, DataError, OnError, SplitConfig, open_annotations
from data.errors import printable
from data.index import read_annotations
from data.validate import is_for_validation
from tests.data.conftest import CocoSet

NAMES = [f"{number:05}.jpg" for number in range(10_000)]


def side(names: list[str], share: float = 0.1) -> list[str]:
    return [name for name, chosen in zip(names, is_for_validation(names, share), strict=True) if chosen]


def test_the_share_is_met() -> None:
    for share in (0.01, 0.1, 0.5, 0.9):
        spread = (share * (1 - share) / len(NAMES)) ** 0.5
        assert abs(is_for_validation(NAMES, share).mean() - share) < 4 * spread
    assert {*side(NAMES, share=0.1)} < {*side(NAMES, share=0.2)}, "a larger share keeps what it has"


def test_names_decide_and_nothing_else() -> None:
    chosen = {*side(NAMES)}
    assert {*side(NAMES[::-1])} == chosen and {*side(NAMES[3000:4000])} == chosen & {*NAMES[3000:4000]}
    assert {Path(name).name for name in side([f"/a/{int(n[:5]) % 7}/{n}" for n in NAMES])} == chosen
    assert {f"{Path(name).stem}.jpg" for name in side([n.replace(".jpg", ".png") for n in NAMES])} == chosen
    accents = [f"é{number}.jpg" for number in range(300)]
    decomposed = side([unicodedata.normalize("NFD", name) for name in accents])
    assert [unicodedata.normalize("NFC", name) for name in decomposed] == side(accents)
    assert len(side(["\udcff.jpg", "a.jpg"], share=0.5)) <= 2, "a name that is not UTF-8 also has a hash"


STEMS = [str(number) for number in range(10, 40)]  # as CocoSet names its images


def stems(annotations: Annotations) -> list[str]:
    return [Path(annotations.file_name(index)).stem for index in range(len(annotations))]


def test_both_parts_hold_all_images_with_their_boxes(empty_set: CocoSet) -> None:
    for number in range(len(STEMS)):
        empty_set.add_image(np.zeros((96, 128, 3), dtype=np.uint8), [(1, [number, 2, 30, 40])])
    empty_set.save()
    config = replace(empty_set.config, val=SplitConfig("nowhere", "nowhere"), names=["dog"])
    whole = open_annotations(config, "train")
    with pytest.raises(DataError, match=r"data\.val\.annotations: there is no .*, or data\.split=0\.1 to take a tenth"):
        open_annotations(config, "val")
    cut = replace(config, split=0.2)
    train, val = open_annotations(cut, "train"), open_annotations(cut, "val")
    assert {*stems(val)} == {*side(STEMS, share=0.2)} and 0 < len(val) < 12
    assert sorted(stems(train) + stems(val)) == sorted(stems(whole)) and len(whole) == 30
    for part in (train, val):
        for index, stem in enumerate(stems(part)):
            number = STEMS.index(stem)
            assert part.image_ids[index] == whole.image_ids[stems(whole).index(stem)]
            classes, boxes = part.training_boxes(index)
            assert classes.tolist() == [0] and round(float(boxes[0, 0])) == number, "its own box"
        assert part.skipped == part.notes == []
    assert stems(open_annotations(config, "train")) == stems(whole), "an index of its own"
    checked, findings, _ = read_annotations(cut, "val")
    assert stems(checked) == stems(val) and not findings.counts


def test_boxes_are_checked_on_their_own_side(coco_set: CocoSet) -> None:
    def opened(part: str, on_error: OnError = OnError.stop) -> Annotations:
        return coco_set.open(part, split=0.5, on_error=on_error)

    train, val = opened("train"), opened("val")
    assert len(train) + len(val) == 7
    bad = next(record for record in coco_set.json["annotations"] if record["image_id"] in train.image_ids)
    bad["bbox"] = [1, 2, 0, 5]
    assert opened("train", OnError.skip).skipped[0] == "left out: boxes without area (1)"
    assert opened("val", OnError.skip).skipped == [] and len(opened("val")) == len(val)
    with pytest.raises(DataError, match=f"annotation {bad['id']} of .* has no area"):
        opened("train")


def test_a_side_without_images_is_refused(empty_set: CocoSet) -> None:
    empty_set.add_image(np.zeros((96, 128, 3), dtype=np.uint8), [(1, [5, 2, 30, 40])])
    with pytest.raises(DataError, match=r"data\.split=0\.5 takes (0|1) of the 1 images .* fix: another share"):
        empty_set.open(split=0.5)


def test_no_name_steers_a_terminal_or_forges_a_line(coco_set: CocoSet) -> None:
    for char in "\x00\x1b\r\n\x7f\x9b\u2028\u202e\u2066\ufeff\udc80":
        assert printable(f"a{char}b").isprintable() and len(printable(char)) > 1
    kept = "Straße 猫　\u200cمی\xa0|"
    assert printable(kept) == kept
    coco_set.json["categories"][0]["name"] = "cat\x1b[2J\nerror: forged"
    assert r"cat\x1b[2J\nerror: forged" in coco_set.open().names
    with pytest.raises(ValueError, match=r"data\.name must be"):
        replace(coco_set.config, name="a\nb")


def test_a_test_set_without_annotations_opens_for_an_evaluation_only(coco_set: CocoSet) -> None:
    del coco_set.json["annotations"]
    opened = coco_set.open("val")
    assert not len(opened.classes) and any("without annotations" in note for note in opened.notes)
    with pytest.raises(DataError, match="0 usable boxes"):
        coco_set.open("train")
