"""Broken and unusual labels of YOLO and annotations of VOC; see ``bad_inputs.py``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data import DataConfig, DataFormat
from tests.data.bad_inputs import (
    GOOD_BOX,
    GOOD_BOXES,
    GOOD_ROW,
    HEIGHT,
    NAMES,
    PICTURE,
    WIDTH,
    Case,
    coco_content,
    config_of,
)

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
    good = {
        "label": (GOOD_ROW.encode(), GOOD_BOXES),
        "label with a byte order mark": (b"\xef\xbb\xbf" + GOOD_ROW.encode(), GOOD_BOXES),
        "label with crlf": (b"0 0.5 0.5 0.5 0.5\r\n1 .25 .25 .5 .5\r\n", [*GOOD_BOXES, [1, 0, 0, 30, 20]]),
        "label with tabs and blanks": (b"\t0\t0.5  0.5 0.5\t0.5 \t \n \n\n", GOOD_BOXES),
        "label without a last line end": (GOOD_ROW.strip().encode(), GOOD_BOXES),
        "label with a class of 1.0": (b"1.000 0.5 0.5 0.5 0.5", [[1, *GOOD_BOX]]),
        "label in powers of ten": (b"0e0 5e-1 5E-1 0.5 +.5", GOOD_BOXES),
        "empty label": (b"", []),
        "label of blank lines": (b"\n \r\n", []),
        "label half a pixel outside": (b"0 0.5 0.5 1.01 1", [[0, -0.3, 0, 60.6, 40]]),
        "label of a polygon": (b"1 .25 .25 .75 .25 .75 .75 .3 .7", [[1, *GOOD_BOX]]),
        "label twice the same": (2 * GOOD_ROW.encode(), 2 * GOOD_BOXES),
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
        "xml": Case(voc_set(plain), boxes=GOOD_BOXES),
        "xml with a byte order mark": Case(voc_set(b"\xef\xbb\xbf" + plain), boxes=GOOD_BOXES),
        "xml in utf-16": Case(voc_set(utf16), boxes=GOOD_BOXES),
        "xml without objects": Case(voc_set(voc_text().replace("object", "thing").encode()), boxes=[]),
        "xml of another file's name": Case(voc_set(plain.replace(b"b.png", b"a")), boxes=GOOD_BOXES),
        "image list with crlf and blanks": Case(voc_set(plain, b"\xef\xbb\xbfa \r\n\r\nb\t\r\n"), boxes=GOOD_BOXES),
        "image list of one class": Case(voc_set(plain, b"a -1\nb  1\n"), boxes=GOOD_BOXES),
        "image list with a missing xml": Case(
            voc_set(plain, b"a\nc\n"), r"list names c, but there is no .*/c\.xml", (1, 1)
        ),
        "image list of noise": Case(voc_set(plain, b"\x00\x01\xff"), r"/list\.txt is not a text file in UTF-8"),
        "image list of other images": Case(
            voc_set(plain, b"x\ny\n"), r"/list\.txt names no image that has an xml file"
        ),
    }
    return cases
