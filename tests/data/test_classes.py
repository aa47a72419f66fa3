"""``data.classes``: in every format the same as a set whose other boxes were removed by hand."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from conf.cli.program import PROGRAMS
from conf.compose import compose
from conf.schema import AnchorsConfig
from data import Annotations, DataError, open_annotations
from tests.data.sets import a_few_of

LINES = Path(__file__).resolve().parents[2] / "docs" / "examples" / "plugins" / "lines_format.py"
CLASSES = ["nine", "ten", "jack", "king"]
BOX = "<object><name>{}</name><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"
XML = "<annotation><size><width>64</width><height>32</height></size>{}</annotation>"
ROWS = [("a", 3), ("b", 1), ("a", 0), ("b", 0), ("a", 1), ("b", 2), ("c", 0)]  # picture and class of each box
FORMS = {  # the options that read the files of write()
    "coco": "data={0}/train.json",
    "data.yaml": "data={0}/data.yaml",
    "obj.data": "data={0}/obj.data",
    "folder": "data={0}/images/",
    "voc": "data={0}/xml/ data.train.images=../images data.names=[nine,ten,jack,king]",
    "plugin": f"data=coco plugins=[{LINES}] data.format=lines data.root={{0}} data.train.annotations=lines.txt "
    "data.train.images=images",
}


def write(root: Path, rows: list[tuple[str, int]]) -> Path:
    """Three pictures, and their boxes in all formats; nines are crowds where a format has them."""
    labels, objects, lines = dict.fromkeys("abc", ""), dict.fromkeys("abc", ""), ""
    images = [{"id": ord(stem), "file_name": f"images/{stem}.png", "width": 64, "height": 32} for stem in "abc"]
    categories = [{"id": 7 + 10 * number, "name": name} for number, name in enumerate(CLASSES)]
    boxes = []
    for stem, number in rows:
        left, top, right, bottom = 8 * number, 4 * number, 32, 16 + 2 * number
        width, height, name = right - left, bottom - top, CLASSES[number]
        labels[stem] += f"{number} {(left + right) / 128} {(top + bottom) / 64} {width / 64} {height / 32}\n"
        objects[stem] += BOX.format(name, left, top, right, bottom)
        lines += f"{stem}.png {name} {left} {top} {right} {bottom}\n"
        box = {"image_id": ord(stem), "bbox": [left, top, width, height], "iscrowd": int(name == "nine")}
        boxes.append(box | {"category_id": categories[number]["id"]})
    for folder in ("images", "xml"):
        (root / folder).mkdir(parents=True)
    for stem in "abc":
        assert cv2.imwrite(str(root / "images" / f"{stem}.png"), np.zeros((32, 64, 3), np.uint8))
        (root / "images" / f"{stem}.txt").write_text(labels[stem])
        (root / "xml" / f"{stem}.xml").write_text(XML.format(objects[stem]))
    (root / "train.json").write_text(json.dumps({"images": images, "annotations": boxes, "categories": categories}))
    (root / "data.yaml").write_text(f"train: images\nnames: {CLASSES}")
    (root / "obj.data").write_text("train=list.txt\nnames=images/classes.txt")
    (root / "list.txt").write_text("images/a.png\nimages/b.png\nimages/c.png")
    (root / "images" / "classes.txt").write_text("\n".join(CLASSES))
    (root / "lines.txt").write_text(lines)
    return root


def opened(root: Path, form: str, *more: str) -> Annotations:
    given = [*FORMS[form].format(root).split(), f"data.index_dir={root.parent}/index", *more]
    return open_annotations(compose("anchors", AnchorsConfig, given, PROGRAMS["anchors"].complete).data, "train")


@pytest.mark.parametrize("form", a_few_of(FORMS, 3))
def test_other_boxes_are_gone_as_if_removed_by_hand(form: str, tmp_path: Path) -> None:
    root = write(tmp_path / "all", ROWS)
    whole, by_hand = opened(root, form), opened(write(tmp_path / "hand", [ROWS[0], ROWS[1], ROWS[4]]), form)
    chosen = opened(root, form, f"data.classes=[king,{whole.names.index('ten')}]")
    assert chosen.names == [name for name in whole.names if name in ("ten", "king")] and len(whole.names) == 4
    assert [Path(chosen.path(index)).name for index in range(len(chosen))] == ["a.png", "b.png", "c.png"]
    assert chosen.offsets.tolist() == [0, 2, 3, 3] and not chosen.crowd.any()
    for array in ("boxes_xywh", "areas"):
        assert np.array_equal(getattr(chosen, array), getattr(by_hand, array)) and len(chosen.boxes_xywh) == 3
    for one in (chosen, by_hand):
        assert [one.names[number] for number in one.classes] == ["king", "ten", "ten"]
    ids = dict(zip(whole.names, whole.category_ids.tolist(), strict=True))
    assert chosen.category_ids.tolist() == [ids[name] for name in chosen.names]
    assert "(4), first: nine 3, jack 1" in chosen.notes[0] and not chosen.skipped
    assert len(opened(root, form).classes) == 7, "an index of its own"


def test_what_is_no_class_or_leaves_no_box_is_answered(tmp_path: Path) -> None:
    root = write(tmp_path / "set", [row for row in ROWS if row[1] != 2])
    for wrong in ("[ten,queen]", "[4]", "[-1]", "[]", "true"):
        with pytest.raises(DataError, match=r"data\.classes .*0 nine, 1 ten, 2 jack, 3 king\. fix: "):
            opened(root, "coco", f"data.classes={wrong}")
    with pytest.raises(DataError, match=r"0 usable boxes.* fix: .*data\.classes"):
        opened(root, "coco", "data.classes=jack")
    single = opened(root, "coco", "data.classes=[ten,3]", "data.single_class=true")
    assert single.names == ["object"] and single.classes.tolist() == [0, 0, 0]
