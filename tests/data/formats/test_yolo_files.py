"""What may name the images of a YOLO set, where labels may lie, and the errors."""

from __future__ import annotations

import numpy as np
import pytest

from data import DataError
from tests.data.yolo_set import YoloSet, assert_whole

LAYOUTS = {
    "images beside labels": ("images", "labels"),
    "a folder of each split": ("images/train", "labels/train"),
    "images in the split": ("train/images", "train/labels"),
    "only the last images": ("images/images/train/images/x", "images/images/train/labels/x"),
    "voc folders": ("JPEGImages", "labels"),
    "all in one folder": ("obj", "obj"),
    "all in one folder named images": ("images", "images"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, yolo_set: YoloSet) -> None:
    images, labels = LAYOUTS[layout]
    yolo_set.add(images, labels)
    assert_whole(yolo_set.open(images))
    names = [f"{images}/{stem}.jpg" for stem in "cab"]
    yolo_set.write("list.txt", "\n".join(names))
    assert_whole(yolo_set.open("list.txt"), "cab")


def test_lists_start_at_the_root_at_the_list_or_at_the_top(yolo_set: YoloSet) -> None:
    yolo_set.add("images/train", "labels/train")
    yolo_set.write("train.txt", "./images/train/a.jpg\n./images/train/b.jpg\n./images/train/c.jpg\n")
    assert_whole(yolo_set.open("train.txt"))
    yolo_set.write("lists/root.txt", "images/train/a.jpg\r\nimages/train/b.jpg\r\nimages/train/c.jpg\r\n")
    assert_whole(yolo_set.open("lists/root.txt"))
    yolo_set.write("lists/own.txt", "../images/train/a.jpg\n../images/train/b.jpg\n../images/train/c.jpg")
    assert_whole(yolo_set.open("lists/own.txt"))
    yolo_set.write("top.txt", "".join(f"{yolo_set.root}/images/train/{stem}.jpg \n\n" for stem in "abc"))
    assert_whole(yolo_set.open("top.txt"))
    yolo_set.write("named.txt", "a.jpg\nb.jpg\nc.jpg\n")
    assert_whole(yolo_set.open("named.txt", images="images/train"))


def test_several_sources(yolo_set: YoloSet) -> None:
    yolo_set.add("one/images", "one/labels", "ab")
    yolo_set.add("two/images", "two/labels", "c")
    assert_whole(yolo_set.open(["one/images", "two/images"]))
    yolo_set.write("two.txt", "c.jpg")
    assert_whole(yolo_set.open(["one/images", "two.txt"], images=[".", "two/images"]))
    yolo_set.add("three", "three", "c")
    assert_whole(yolo_set.open(["one/images", "three"]))
    (yolo_set.root / "three" / "c.txt").unlink()
    assert np.diff(yolo_set.open(["one/images", "three"]).offsets).tolist() == [1, 1, 0], "pictures without objects"
    with pytest.raises(ValueError, match=r"data.train.images holds 3 folders for 2 annotations"):
        yolo_set.open(["one/images", "two.txt"], images=["a", "b", "c"])


def test_a_folder_is_searched_to_the_bottom_in_order(yolo_set: YoloSet) -> None:
    yolo_set.add("images/1/x", "labels/1/x", "a")
    yolo_set.add("images/2", "labels/2", "b")
    yolo_set.add("images/3", "labels/3", "c")
    yolo_set.add("images/.hidden", "labels/.hidden")
    yolo_set.write("images/notes.txt", "no picture")
    (yolo_set.root / "images" / "3" / "up").symlink_to("../..", target_is_directory=True)
    assert_whole(yolo_set.open("images"))


YAMLS = {
    "folders": "train: images/train\nval: images/train\nnames: [x, y, z]",
    "numbered names": "train: images/train\nnames:\n  0: x\n  1: y\n  2: z",
    "a path": "path: set\ntrain: images/train\nnames: [x, y, z]\nnc: 3",
    "its own path": "path: {root}\ntrain: images/train\nnames: [x, y, z]",
    "another's path": "path: /elsewhere\ntrain: images/train\nnames: [x, y, z]",
    "an absolute folder": "train: {root}/images/train\nnames: [x, y, z]",
    "a list": "train: train.txt\nnames: [x, y, z]",
    "several": "train: [images/train/1, images/train/2]\nnames: [x, y, z]",
    "roboflow": "train: ../images/train\nval: ../images/valid\nnc: 3\nnames: ['x', 'y', 'z']\nroboflow: {{version: 1}}",
    "names of numbers": "train: images/train\nnames: [7, 8, 9]",
}


@pytest.mark.parametrize("case", YAMLS)
def test_data_yaml(case: str, yolo_set: YoloSet) -> None:
    yolo_set.add("images/train/1", "labels/train/1", "ab")
    yolo_set.add("images/train/2", "labels/train/2", "c")
    yolo_set.write(
        "train.txt", "".join(f"./images/train/{number}/{stem}.jpg\n" for number, stem in ((1, "a"), (1, "b"), (2, "c")))
    )
    yolo_set.write("data.yaml", YAMLS[case].format(root=yolo_set.root))
    annotations = yolo_set.open("data.yaml", names=None)
    assert_whole(annotations)
    assert annotations.names == (["7", "8", "9"] if case == "names of numbers" else ["x", "y", "z"])


def test_names_choose_and_order_those_of_the_yaml(yolo_set: YoloSet) -> None:
    yolo_set.add("images", "labels", "ac")
    yolo_set.write("data.yaml", "train: images\nval: images\nnames: [x, y, z]")
    annotations = yolo_set.open("data.yaml", names=["z", "x"], split="val")
    assert annotations.names == ["z", "x"] and annotations.category_ids.tolist() == [2, 0]
    assert annotations.classes.tolist() == [1, 0]
    with pytest.raises(DataError, match=r"category 2, which is not one of the 2 classes in use"):
        yolo_set.open("data.yaml", names=["x", "y"])
    with pytest.raises(DataError, match=r"data.names holds 'zz', .* did you mean 'z'"):
        yolo_set.open("data.yaml", names=["x", "zz"])


WRONG_YAMLS = {
    "train: [": r"data\.yaml is not valid YAML",
    "- 1\n- 2": r"data\.yaml holds no keys",
    "": r"data\.yaml holds no keys",
    "val: images\nnames: [x]": r"data\.yaml names no images under 'train'",
    "train: 7\nnames: [x]": r"data\.yaml names no images under 'train'",
    "train: pictures\nnames: [x]": r"data\.yaml names pictures for 'train', but there is no such .*/set/pictures\)",
    "train: data.yaml\nnames: [x]": r"data\.yaml names data\.yaml for 'train', but",
    "train: images\npath: 7\nnames: [x]": r"data\.yaml has path=7",
    "train: images\nnames: x": r"data\.yaml has names='x'. fix: make it a list",
    "train: images\nnames: []": r"data\.yaml has names=\[\]",
    "train: images\nnames: {1: x, 2: y}": r"the keys of names are \[1, 2\]. fix: number them from 0",
    "train: images\nnames: [yes, no]": r"has the class name True. fix: make it a text, in quotes",
    "train: images\nnames: [x, [y]]": r"has the class name \['y'\]",
    "train: images\nnames: [x, y, x]": r"two classes of the name 'x'",
    "train: images\nnames: [x, y, z]\nnc: 4": r"has nc=4, but 3 names",
    "train: images\nkpt_shape: [17, 3]\nnames: [x]": r"is for key points",
    "train: images": r"data\.yaml holds no class names. fix: set data.names",
    "train: images\nwhen: 2026-13-45\nnames: [x]": r"data\.yaml is not valid YAML",
}


@pytest.mark.parametrize("text", WRONG_YAMLS)
def test_wrong_data_yaml(text: str, yolo_set: YoloSet) -> None:
    yolo_set.add("images", "labels")
    yolo_set.write("data.yaml", text)
    with pytest.raises(DataError, match=WRONG_YAMLS[text]) as caught:
        yolo_set.open("data.yaml", names=None)
    assert "fix: " in str(caught.value) and "\n" not in str(caught.value)


def test_what_leads_nowhere(yolo_set: YoloSet) -> None:
    yolo_set.add("images", "elsewhere")
    yolo_set.add("empty", "labels", "")
    with pytest.raises(DataError, match=r"none of the 3 images .* has a label file .*/set/labels/a\.txt\)"):
        yolo_set.open("images")
    with pytest.raises(DataError, match=r"/empty holds no images"):
        yolo_set.open("empty")
    with pytest.raises(DataError, match=r"images holds no class names. fix: set data.names"):
        yolo_set.open("images", names=None)
    yolo_set.write("list.txt", "x/a.jpg\nx/b.jpg\n")
    with pytest.raises(DataError, match=r"none of the 2 images of .*list\.txt is there \(first: .*/set/x/a\.jpg\)"):
        yolo_set.open("list.txt")
    yolo_set.write("list.txt", "\n\n")
    with pytest.raises(DataError, match=r"list\.txt lists no image"):
        yolo_set.open("list.txt")
    with pytest.raises(DataError, match=r"a\.jpg is not a text file in UTF-8"):
        yolo_set.open("images/a.jpg")
