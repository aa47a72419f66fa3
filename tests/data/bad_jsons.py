"""Broken and unusual files of COCO annotations; see ``bad_inputs.py``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from data import DataConfig, DataFormat
from tests.data.bad_inputs import GOOD_BOXES, HEIGHT, PICTURE, WIDTH, Case, coco_content, config_of


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
    return whole_jsons() | json_ids_and_names() | json_boxes()


def whole_jsons() -> dict[str, Case]:
    whole = json.dumps(coco_content())
    invalid, no_set = r"/set\.json is not valid JSON", r"/set\.json is not a COCO instances file"
    return {
        "json": Case(coco_set(whole.encode()), boxes=GOOD_BOXES),
        "json with a byte order mark": Case(coco_set(b"\xef\xbb\xbf" + whole.encode()), boxes=GOOD_BOXES),
        "truncated json": Case(coco_set(whole[:-40].encode()), invalid),
        "empty json": Case(coco_set(b""), invalid),
        "json in latin-1": Case(coco_set(whole.replace('"cat"', '"katzé"').encode("latin-1")), invalid),
        "json with a second text": Case(coco_set(f"{whole}\n{whole}".encode()), invalid),
        "json of 100,000 brackets": Case(coco_set(b"[" * 100_000), no_set),
        "json with a number of 5,000 digits": Case(coco_set(whole.replace("600", "6" * 5000).encode()), no_set),
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
        "category without name": Case(
            coco_set(lambda tree: tree["categories"][0].pop("name")), r"`name` - at `\$.categories"
        ),
    }


def json_ids_and_names() -> dict[str, Case]:
    return {
        "image id of text": Case(image(id="two"), r"at `\$.images\[1\].id`"),
        "image id of nan": Case(image(id=float("nan")), r"set\.json is not valid JSON"),
        "image id beyond 64 bits": Case(image(id=2**70), r"at `\$.images\[1\].id`"),
        "category id beyond 64 bits": Case(box(category_id=-(2**80)), r"at `\$.annotations\[1\].category_id`"),
        "image id twice": Case(image(id=1), r"set\.json: image id 1 is used twice, also by b\.png", (1, 1)),
        "largest image id": Case(
            coco_set(lambda t: (t["images"][1].update(id=2**63 - 1), t["annotations"][1].update(image_id=2**63 - 1))),
            boxes=GOOD_BOXES,
        ),
        "annotation id twice": Case(box(id=11), boxes=GOOD_BOXES),
        "annotation of an unknown image": Case(box(image_id=7), r"set\.json: annotation 12 of image id 7", (2, 1)),
        "annotation of an unknown class": Case(box(category_id=10**9), r"annotation 12 .* category 1000000000", (2, 1)),
        "annotation without image": Case(
            coco_set(lambda tree: tree["annotations"][1].pop("image_id")), r"`image_id` - at `\$"
        ),
        "width of text": Case(image(width="sixty"), r"at `\$.images\[1\].width`"),
        "image of 10^12 pixels": Case(image(width=10**6, height=10**6), r"set\.json: b\.png is 1,000,000 x", (1, 1)),
        "image of 10^36 pixels": Case(image(width=10**18, height=10**18), r"b\.png is 1,000,000,000,000,000,", (1, 1)),
        "image of other size": Case(image(width=61), r"/b\.png has 60 x 40 pixels, its annotations .* 61 x 40", (1, 1)),
        "file name of a number": Case(image(file_name=7), r"at `\$.images\[1\].file_name`"),
        "file name that is empty": Case(image(file_name=""), r"set\.json names , which is not in", (1, 1)),
        "file name with a zero byte": Case(image(file_name="x\0/b.png"), r"names x.*b\.png, which is not in", (1, 1)),
        "file name of half a character": Case(image(file_name="\ud800.png"), r"set\.json is not valid JSON"),
        "file name of 5,000 letters": Case(
            image(file_name="d" * 5000 + "/b.png"), r"names ddd.*, which is not", (1, 1)
        ),
        "file name of a folder": Case(image(file_name=".."), r"set\.json names \.\., which is not in", (1, 1)),
    }


def json_boxes() -> dict[str, Case]:
    rle = {"counts": [5, 10, 5], "size": [HEIGHT, WIDTH]}
    return {
        "box with nan": Case(box(bbox=[1, float("nan"), 5, 5]), r"set\.json is not valid JSON"),
        "box of 400 digits": Case(box(bbox=[1, 2, 10**400, 5]), r"at `\$.annotations\[1\].bbox\[2\]`"),
        "box of texts": Case(box(bbox=["a", "2", "3", "4"]), r"at `\$.annotations\[1\].bbox\[0\]`"),
        "box of three numbers": Case(box(bbox=[1, 2, 3]), r"annotation 12 has the bbox \(1.0, 2.0, 3.0\)", (2, 1)),
        "box of a thousand numbers": Case(box(bbox=[1] * 1000), r"annotation 12 has the bbox \(1.0, 1.{,60}\)", (2, 1)),
        "box of null": Case(box(bbox=None), r"annotation 12 has the bbox None", (2, 1)),
        "box with swapped corners": Case(box(bbox=[45, 30, -30, -20]), r"annotation 12 .* has no area", (2, 1)),
        "box without height": Case(box(bbox=[1, 2, 5, 0]), r"annotation 12 .* has no area", (2, 1)),
        "box outside": Case(box(bbox=[-30, 2, 20, 5]), r"annotation 12 .* lies outside its image", (2, 1)),
        "negative area": Case(box(area=-1), r"annotation 12 .* has no area", (2, 1)),
        "area of text": Case(box(area="large"), r"at `\$.annotations\[1\].area`"),
        "iscrowd of text": Case(box(iscrowd="yes"), r"at `\$.annotations\[1\].iscrowd`"),
        "crowd with a run-length mask": Case(box(iscrowd=1, segmentation=rle, area=77.5), boxes=GOOD_BOXES),
        "area of null": Case(box(area=None), boxes=GOOD_BOXES),
    }
