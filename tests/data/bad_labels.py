"""Broken and unusual annotations in the three formats; see ``bad_inputs.py``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data import DataConfig, DataFormat
from tests.data.bad_inputs import GOOD_BOX, GOOD_ROW, HEIGHT, NAMES, PICTURE, WIDTH, Case, coco_content, config_of

# COCO json


def coco_set(content: bytes | Callable[[dict[str, Any]], Any]) -> Callable[[Path], DataConfig]:
    """The good set with an edit of its json, or with these bytes for it."""

    def write(root: Path) -> DataConfig:
        (root / "images").mkdir(parents=True)
        for name in ("a.png", "b.png"):
            Image.fromarray(PICTURE).save(root / "images" / name)
        if isinstance(content, bytes):
            (root / "set.json").write_bytes(content)
        else:
            tree = coco_content()
            content(tree)
            (root / "set.json").write_text(json.dumps(tree))
        return config_of(root, DataFormat.coco, "set.json", "images", None)

    return write


def image(**changes: Any) -> Callable[[Path], DataConfig]:
    return coco_set(lambda tree: tree["images"][1].update(changes))


def box(**changes: Any) -> Callable[[Path], DataConfig]:
    return coco_set(lambda tree: tree["annotations"][1].update(changes))


def jsons() -> dict[str, Case]:
    whole = json.dumps(coco_content())
    invalid, no_set = r"/set\.json is not valid JSON", r"/set\.json is not a COCO instances file"
    rle = {"counts": [5, 10, 5], "size": [HEIGHT, WIDTH]}
    good_box = [[0.0, *GOOD_BOX]]
    return {
        "json": Case(coco_set(whole.encode()), boxes=good_box),
        "json with a byte order mark": Case(coco_set(b"\xef\xbb\xbf" + whole.encode()), boxes=good_box),
        "truncated json": Case(coco_set(whole[:-40].encode()), invalid),
        "empty json": Case(coco_set(b""), invalid),
        "json in latin-1": Case(coco_set(whole.replace("cat", "katzé").encode("latin-1")), invalid),
        "json with a second text": Case(coco_set(f"{whole}\n{whole}".encode()), invalid),
        "json of 100,000 brackets": Case(coco_set(b"[" * 100_000), invalid),
        "json with a number of 5,000 digits": Case(coco_set(whole.replace("600", "6" * 5000).encode()), invalid),
        "json with a list at the top": Case(coco_set(f"[{whole}]".encode()), no_set),
        "json of a text": Case(coco_set(b'"images"'), no_set),
        "json without images": Case(coco_set(lambda tree: tree.pop("images")), no_set),
        "json without annotations": Case(coco_set(lambda tree: tree.pop("annotations")), no_set),
        "json without categories": Case(coco_set(lambda tree: tree.pop("categories")), no_set),
        "json with images of null": Case(coco_set(lambda tree: tree.update(images=None)), no_set),
        "json with zero images": Case(
            coco_set(lambda tree: tree.update(images=[], annotations=[])), r"/set\.json lists no usable image"
        ),
        "annotation that is a number": Case(coco_set(lambda tree: tree["annotations"].append(5)), no_set),
        "category twice": Case(
            coco_set(lambda tree: tree["categories"].append({"id": 1, "name": "cow"})), r"two categories with the id 1"
        ),
        "category without name": Case(coco_set(lambda tree: tree["categories"][0].pop("name")), r"name=None"),
        "image id of text": Case(image(id="two"), r"image 'two' has id='two'"),
        "image id of nan": Case(image(id=float("nan")), r"set\.json: image nan has id=nan"),
        "image id beyond 64 bits": Case(image(id=2**70), r"set\.json: an image has id=1180591620717411303424"),
        "category id beyond 64 bits": Case(box(category_id=-(2**80)), r"set\.json: an annotation has category_id=-"),
        "image id twice": Case(image(id=1), r"set\.json: image id 1 is used twice, also by b\.png", (1, 1)),
        "largest image id": Case(
            coco_set(lambda t: (t["images"][1].update(id=2**63 - 1), t["annotations"][1].update(image_id=2**63 - 1))),
            boxes=good_box,
        ),
        "annotation id twice": Case(box(id=11), boxes=good_box),
        "annotation of an unknown image": Case(box(image_id=7), r"set\.json: annotation 12 of image id 7", (2, 1)),
        "annotation of an unknown class": Case(box(category_id=10**9), r"annotation 12 .* category 1000000000", (2, 1)),
        "annotation without image": Case(
            coco_set(lambda tree: tree["annotations"][1].pop("image_id")), r"annotation 12 has no 'image_id'", (2, 1)
        ),
        "width of text": Case(image(width="sixty"), r"set\.json: image 2 has width='sixty'"),
        "image of 10^12 pixels": Case(image(width=10**6, height=10**6), r"set\.json: b\.png is 1,000,000 x", (1, 1)),
        "image of 10^36 pixels": Case(image(width=10**18, height=10**18), r"b\.png is 1,000,000,000,000,000,", (1, 1)),
        "image of other size": Case(image(width=61), r"/b\.png has 60 x 40 pixels, its annotations .* 61 x 40", (1, 1)),
        "file name of a number": Case(image(file_name=7), r"set\.json: image 2 has file_name=7"),
        "file name that is empty": Case(image(file_name=""), r"set\.json names , which is not in", (1, 1)),
        "file name with a zero byte": Case(image(file_name="x\0/b.png"), r"names x.*b\.png, which is not in", (1, 1)),
        "file name of half a character": Case(image(file_name="\ud800.png"), r"names \\ud800\.png, which", (1, 1)),
        "file name of 5,000 letters": Case(
            image(file_name="d" * 5000 + "/b.png"), r"names ddd.*, which is not", (1, 1)
        ),
        "file name of a folder": Case(image(file_name=".."), r"set\.json names \.\., which is not in", (1, 1)),
        "box with nan": Case(box(bbox=[1, float("nan"), 5, 5]), r"annotation 12 .* not finite", (2, 1)),
        "box with infinity": Case(box(bbox=[1, 2, float("inf"), 5]), r"annotation 12 .* not finite", (2, 1)),
        "box of 400 digits": Case(box(bbox=[1, 2, 10**400, 5]), r"annotation 12 has the bbox", (2, 1)),
        "box of texts": Case(box(bbox=["1", "2", "3", "4"]), r"annotation 12 has the bbox \['1'", (2, 1)),
        "box of three numbers": Case(box(bbox=[1, 2, 3]), r"annotation 12 has the bbox \[1, 2, 3\]", (2, 1)),
        "box of a thousand numbers": Case(box(bbox=[1] * 1000), r"annotation 12 has the bbox \[1, 1.{,60}\]", (2, 1)),
        "box of null": Case(box(bbox=None), r"annotation 12 has the bbox None", (2, 1)),
        "box with swapped corners": Case(box(bbox=[45, 30, -30, -20]), r"annotation 12 .* has no area", (2, 1)),
        "box without height": Case(box(bbox=[1, 2, 5, 0]), r"annotation 12 .* has no area", (2, 1)),
        "box outside": Case(box(bbox=[-30, 2, 20, 5]), r"annotation 12 .* lies outside its image", (2, 1)),
        "negative area": Case(box(area=-1), r"annotation 12 .* has no area", (2, 1)),
        "area of text": Case(box(area="600"), r"annotation 12 has the area '600' instead of a number", (2, 1)),
        "iscrowd of text": Case(box(iscrowd="0"), r"annotation 12 has iscrowd='0' instead of 0 or 1", (2, 1)),
        "crowd with a run-length mask": Case(box(iscrowd=1, segmentation=rle, area=77.5), boxes=good_box),
        "area of null": Case(box(area=None), boxes=good_box),
    }


# YOLO txt


def yolo_set(label: bytes | Callable[[Path], Any]) -> Callable[[Path], DataConfig]:
    """A folder of two images; the second one's label file holds these bytes."""

    def write(root: Path) -> DataConfig:
        for folder in ("images", "labels"):
            (root / folder / "train").mkdir(parents=True)
        for stem in ("a", "b"):
            Image.fromarray(PICTURE).save(root / "images" / "train" / f"{stem}.png")
        (root / "labels" / "train" / "a.txt").write_text(GOOD_ROW)
        path = root / "labels" / "train" / "b.txt"
        if isinstance(label, bytes):
            path.write_bytes(label)
        else:
            label(path)
        return config_of(root, DataFormat.yolo, "images/train", ".", NAMES)

    return write


def labels() -> dict[str, Case]:
    good_box = [[0.0, *GOOD_BOX]]
    good = {
        "label": (GOOD_ROW.encode(), good_box),
        "label with a byte order mark": (b"\xef\xbb\xbf" + GOOD_ROW.encode(), good_box),
        "label with crlf": (b"0 0.5 0.5 0.5 0.5\r\n1 .25 .25 .5 .5\r\n", [*good_box, [1, 0, 0, 30, 20]]),
        "label with tabs and blanks": (b"\t0\t0.5  0.5 0.5\t0.5 \t \n \n\n", good_box),
        "label without a last line end": (GOOD_ROW.strip().encode(), good_box),
        "label with a class of 1.0": (b"1.000 0.5 0.5 0.5 0.5", [[1, *GOOD_BOX]]),
        "label in powers of ten": (b"0e0 5e-1 5E-1 0.5 +.5", good_box),
        "empty label": (b"", []),
        "label of blank lines": (b"\n \r\n", []),
        "label half a pixel outside": (b"0 0.5 0.5 1.01 1", [[0, -0.3, 0, 60.6, 40]]),
        "label of a polygon": (b"1 .25 .25 .75 .25 .75 .75 .3 .7", [[1, *GOOD_BOX]]),
        "label twice the same": (2 * GOOD_ROW.encode(), 2 * good_box),
        "missing label": (lambda path: None, []),
    }
    cases = {name: Case(yolo_set(label), boxes=boxes) for name, (label, boxes) in good.items()}
    bad = {
        "nan": (b"0 0.5 nan 0.5 0.5", r"b\.txt:1 .* not finite"),
        "infinity": (b"0 0.5 0.5 inf 0.5", r"b\.txt:1 .* not finite"),
        "a number of 400 digits": (b"0 0.5 0.5 0.5 " + b"9" * 400, r"b\.txt:1 .* not finite"),
        "a polygon with nan": (b"0 .1 .1 nan .5 .9 .9", r"b\.txt:1 .* not finite"),
        "a negative centre": (b"0 -0.5 0.5 0.5 0.5", r"b\.txt:1 .* lies outside its image of 60 x 40"),
        "a negative width": (b"0 0.5 0.5 -0.5 0.5", r"b\.txt:1 .* has no area"),
        "no height": (b"0 0.5 0.5 0.5 0", r"b\.txt:1 .* has no area"),
        "pixels": (b"0 30 20 30 20", r"/b\.txt:1 holds 30 where YOLO has fractions"),
        "a class without name": (b"\n2 0.5 0.5 0.5 0.5", r"/b\.txt:2 is of class 2, but there are names for 2 classes"),
        "a class of -1": (b"-1 0.5 0.5 0.5 0.5", r"/b\.txt:1 is of class -1, but"),
        "a class of 1e9": (b"1e9 0.5 0.5 0.5 0.5", r"/b\.txt:1 is of class 1000000000, but"),
        "a class of 1e30": (b"1e30 0.5 0.5 0.5 0.5", r"/b\.txt:1 is of class '1e30' instead of a whole number"),
        "a class of 1.5": (b"1.5 0.5 0.5 0.5 0.5", r"/b\.txt:1 is of class '1\.5' instead of a whole number"),
        "a class of nan": (b"nan 0.5 0.5 0.5 0.5", r"/b\.txt:1 is of class 'nan' instead"),
        "a class by name": (b"cat 0.5 0.5 0.5 0.5", r"/b\.txt:1 holds 'cat 0\.5 0\.5 0\.5 0\.5' instead of numbers"),
        "missing columns": (b"0 0.5 0.5 0.5", r"/b\.txt:1 has 4 columns instead of 5"),
        "an extra column": (b"0 0.5 0.5 0.5 0.5 0.9", r"/b\.txt:1 has 6 columns instead of 5"),
        "a polygon without its last number": (b"0 .1 .1 .9 .1 .9 .9 .1", r"/b\.txt:1 has 8 columns"),
        "commas": (b"0,0.5,0.5,0.5,0.5", r"/b\.txt:1 holds '0,0\.5,0\.5,0\.5,0\.5' instead of numbers"),
        "a line of 10,000 letters": (b"x" * 10_000, r"/b\.txt:1 holds 'x.{,60}' instead of numbers"),
        "a zero byte": (b"0 0.5 0.5 0.5 0.\x005", r"/b\.txt:1 holds"),
        "noise": (b"\x89PNG" + np.random.default_rng(1).bytes(500), r"/b\.txt is not a text file in UTF-8"),
        "utf-16": (GOOD_ROW.encode("utf-16"), r"/b\.txt is not a text file in UTF-8"),
    }
    cases |= {f"label with {name}": Case(yolo_set(label), error, (2, 1)) for name, (label, error) in bad.items()}
    over = b"0 0.9 0.5 0.5 0.5"
    cases["label with a box over the edge"] = Case(yolo_set(over), r"b\.txt:1 .* reaches 9\.00 px out", (2, 2))
    cases["label that is a folder"] = Case(yolo_set(Path.mkdir), r"/b\.txt is not a file", (2, 1))
    cases["label that is a pipe"] = Case(yolo_set(os.mkfifo), r"/b\.txt is not a file", (2, 1))
    return cases


# VOC xml


OBJECT = "<object><name>cat</name><bndbox>{}</bndbox></object>"
CORNERS = "<xmin>15</xmin><ymin>10</ymin><xmax>45</xmax><ymax>30</ymax>"
SIZE = f"<size><width>{WIDTH}</width><height>{HEIGHT}</height></size>"


def voc_text(size: str = SIZE, corners: str = CORNERS) -> str:
    return f"<annotation><filename>b.png</filename>{size}{OBJECT.format(corners)}</annotation>"


def voc_set(content: bytes, listed: bytes = b"a\nb\n") -> Callable[[Path], DataConfig]:
    def write(root: Path) -> DataConfig:
        for folder in ("Annotations", "JPEGImages"):
            (root / folder).mkdir(parents=True)
        for stem in ("a", "b"):
            Image.fromarray(PICTURE).save(root / "JPEGImages" / f"{stem}.png")
        (root / "Annotations" / "a.xml").write_text(voc_text())
        (root / "Annotations" / "b.xml").write_bytes(content)
        (root / "list.txt").write_bytes(listed)
        return config_of(root, DataFormat.voc, "list.txt", ".", NAMES)

    return write


def xmls() -> dict[str, Case]:
    levels = "".join(f'<!ENTITY e{n + 1} "{f"&e{n};" * 10}">' for n in range(9))
    laughs = f'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY e0 "ha">{levels}]>' + voc_text(corners="&e9;")
    outside = f'<!DOCTYPE x [<!ENTITY f SYSTEM "file:///etc/passwd">]>{voc_text(corners="&f;")}'
    good_box = [[0.0, *GOOD_BOX]]
    invalid = r"/b\.xml is not valid XML"
    utf16 = f'<?xml version="1.0" encoding="utf-16"?>{voc_text()}'.encode("utf-16")
    bad = {
        "xml with a billion laughs": (laughs, rf"{invalid} \(a DOCTYPE is not read\)", (1, 1)),
        "xml with a foreign entity": (outside, rf"{invalid} \(a DOCTYPE is not read\)", (1, 1)),
        "truncated xml": (voc_text()[:-30], invalid, (1, 1)),
        "empty xml": ("", invalid, (1, 1)),
        "xml of unknown encoding": (f'<?xml version="1.0" encoding="klingon"?>{voc_text()}', invalid, (1, 1)),
        "json named xml": (json.dumps(coco_content()), invalid, (1, 1)),
        "xml without size": (voc_text(size=""), r"/b\.xml has the height '' in <size>", (1, 1)),
        "xml with a size of text": (voc_text(SIZE.replace("60", "sixty")), r"/b\.xml has the width 'sixty'", (1, 1)),
        "xml with a size of zero": (voc_text(SIZE.replace("60", "0")), r"b\.png is 0 x 40 pixels", (1, 1)),
        "xml with a size of 5,000 digits": (voc_text(SIZE.replace("60", "6" * 5000)), r"has the width '666", (1, 1)),
        "xml without bndbox": (voc_text(corners="").replace("<bndbox></bndbox>", ""), r"b\.xml has no bndbox", (2, 1)),
        "xml without xmax": (voc_text(corners=CORNERS.replace("xmax", "xend")), r"b\.xml has no bndbox with", (2, 1)),
        "xml with swapped corners": (
            voc_text(corners=CORNERS.replace("15", "45").replace("<xmax>45", "<xmax>15")),
            r"object 1 of b\.xml .* has no area",
            (2, 1),
        ),
        "xml with nan": (voc_text(corners=CORNERS.replace("15", "NaN")), r"object 1 of b\.xml .* not finite", (2, 1)),
        "xml with an unknown class": (
            voc_text().replace("cat", "cta"),
            r"object 1 of b\.xml is of class 'cta', .* did you mean 'cat'",
            (2, 1),
        ),
    }
    cases = {name: Case(voc_set(text.encode()), error, left) for name, (text, error, left) in bad.items()}
    plain = voc_text().encode()
    cases |= {
        "xml": Case(voc_set(plain), boxes=good_box),
        "xml with a byte order mark": Case(voc_set(b"\xef\xbb\xbf" + plain), boxes=good_box),
        "xml in utf-16": Case(voc_set(utf16), boxes=good_box),
        "xml without objects": Case(voc_set(voc_text().replace("object", "thing").encode()), boxes=[]),
        "xml of another file's name": Case(voc_set(plain.replace(b"b.png", b"a")), boxes=good_box),
        "image list with crlf and blanks": Case(voc_set(plain, b"\xef\xbb\xbfa \r\n\r\nb\t\r\n"), boxes=good_box),
        "image list of one class": Case(voc_set(plain, b"a -1\nb  1\n"), boxes=good_box),
        "image list with a missing xml": Case(
            voc_set(plain, b"a\nc\n"), r"list names c, but there is no .*/c\.xml", (1, 1)
        ),
        "image list of noise": Case(voc_set(plain, b"\x00\x01\xff"), r"/list\.txt is not a text file in UTF-8"),
        "image list of other images": Case(
            voc_set(plain, b"x\ny\n"), r"/list\.txt names no image that has an xml file"
        ),
    }
    return cases
