"""``data.classes``: in every format the same as a set whose other boxes were removed by hand."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from conf.entry import compose
from conf.schema import AnchorsConfig
from data import Annotations, DataError, open_annotations

LINES = Path(__file__).resolve().parents[2] / "docs" / "examples" / "plugins" / "lines_format.py"
CLASSES = ["nine", "ten", "jack", "king"]
BOX = "<object><name>{}</name><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"
ROWS = [  # image, class, left, top, right, bottom of 60x40 pixels; c has a nine only; crowds end at 20
    ("a", "king", 2, 4, 30, 20), ("b", "ten", 0, 0, 40, 40), ("a", "nine", 8, 2, 12, 30), ("b", "nine", 1, 2, 3, 20),
    ("a", "ten", 6, 6, 26, 30), ("b", "jack", 10, 12, 40, 36), ("c", "nine", 10, 10, 20, 20),
]  # fmt: skip
FORMS = {  # the options that read the files of write()
    "coco": "data={0}/train.json",
    "data.yaml": "data={0}/data.yaml",
    "obj.data": "data={0}/obj.data",
    "folder": "data={0}/images/",
    "voc": "data={0}/xml/ data.train.images=../images data.names=[nine,ten,jack,king]",
    "plugin": f"data=coco plugins=[{LINES}] data.format=lines data.root={{0}} data.train.annotations=lines.txt "
    "data.train.images=images",
}


def write(root: Path, rows: list[tuple[str, str, int, int, int, int]]) -> Path:
    """Three pictures, and their boxes in all formats."""
    files = {f"{kind}/{stem}.{kind}": "" for stem in "abc" for kind in ("txt", "xml")}
    instances: dict[str, list[dict[str, object]]] = {
        "images": [{"id": 5 + i, "file_name": f"images/{'abc'[i]}.png", "width": 60, "height": 40} for i in range(3)],
        "categories": [{"id": 7 + 10 * number, "name": name} for number, name in enumerate(CLASSES)],
        "annotations": [],
    }
    for stem, name, left, top, right, bottom in rows:
        box, width, height, number = (left, top, right, bottom), right - left, bottom - top, CLASSES.index(name)
        centre = (left + right) / 120, (top + bottom) / 80
        files[f"txt/{stem}.txt"] += f"{number} {centre[0]} {centre[1]} {width / 60} {height / 40}\n"
        files[f"xml/{stem}.xml"] += BOX.format(name, *box)
        instances["annotations"].append({
            "image_id": 5 + "abc".index(stem), "category_id": 7 + 10 * number, "bbox": [left, top, width, height],
            "iscrowd": int(bottom == 20),
        })  # fmt: skip
    files["lines.txt"] = "\n".join(f"{row[0]}.png {' '.join(map(str, row[1:]))}" for row in rows)
    files |= {"train.json": json.dumps(instances), "images/classes.txt": "\n".join(CLASSES)}
    files |= {"data.yaml": f"train: images\nnames: {CLASSES}", "list.txt": "images/a.png\nimages/b.png\nimages/c.png"}
    files["obj.data"] = "train=list.txt\nnames=images/classes.txt"
    for name, text in files.items():
        path = root / name.replace("txt/", "images/")
        path.parent.mkdir(parents=True, exist_ok=True)
        size = "<size><width>60</width><height>40</height></size>"
        path.write_text(f"<annotation>{size}{text}</annotation>" if path.suffix == ".xml" else text)
    for stem in "abc":
        assert cv2.imwrite(str(root / "images" / f"{stem}.png"), np.zeros((40, 60, 3), np.uint8))
    return root


def opened(root: Path, form: str, *more: str) -> Annotations:
    given = [*FORMS[form].format(root).split(), f"data.index_dir={root.parent}/index", *more]
    return open_annotations(compose("anchors", AnchorsConfig, given).data, "train")


@pytest.mark.parametrize("form", FORMS)
def test_other_boxes_are_gone_as_if_removed_by_hand(form: str, tmp_path: Path) -> None:
    rows = [row for row in ROWS if row[1] in ("ten", "king")]
    root, by_hand = write(tmp_path / "all", ROWS), opened(write(tmp_path / "hand", rows), form)
    whole = opened(root, form)
    chosen = opened(root, form, f"data.classes=[king,{whole.names.index('ten')}]")
    assert chosen.names == [name for name in whole.names if name in ("ten", "king")] and len(whole.names) == 4
    assert [Path(chosen.path(index)).name for index in range(len(chosen))] == ["a.png", "b.png", "c.png"]
    for array in ("boxes_xywh", "areas", "crowd"):
        assert np.array_equal(getattr(chosen, array), getattr(by_hand, array)) and len(chosen.classes) == 3
    assert chosen.offsets.tolist() == [0, 2, 3, 3] and by_hand.offsets.tolist()[:3] == [0, 2, 3]
    for one in (chosen, by_hand):
        assert [one.names[number] for number in one.classes] == ["king", "ten", "ten"]
    ids = dict(zip(whole.names, whole.category_ids.tolist(), strict=True))
    assert chosen.category_ids.tolist() == [ids[name] for name in chosen.names]
    (note,) = chosen.notes
    assert "(4)" in note and "nine 3" in note and not chosen.skipped
    assert len(opened(root, form).classes) == 7, "an index of its own"


def test_what_is_no_class_or_leaves_no_box_is_answered(tmp_path: Path) -> None:
    root = write(tmp_path / "set", [row for row in ROWS if row[1] != "jack"])
    for wrong in ("[ten,queen]", "[4]", "[-1]", "[]", "true"):
        with pytest.raises(DataError, match=r"data\.classes .*0 nine, 1 ten, 2 jack, 3 king\. fix: "):
            opened(root, "coco", f"data.classes={wrong}")
    with pytest.raises(DataError, match=r"0 usable boxes.* fix: .*data\.classes"):
        opened(root, "coco", "data.classes=jack")
    single = opened(root, "coco", "data.classes=[ten,3]", "data.single_class=true")
    assert single.names == ["object"] and single.classes.tolist() == [0, 0, 0]
