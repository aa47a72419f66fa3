"""What is read from YOLO labels and images, and when their index is rebuilt."""

import os
from dataclasses import replace

import cv2
import numpy as np
import pytest

from data import DataError, open_annotations
from tests.data.sets import YoloSet, assert_whole

LAYOUTS = {
    "only the last images": ("images/images/train/images/x", "images/images/train/labels/x"),
    "voc folders": ("JPEGImages", "labels"),
    "all in one folder named images": ("images", "images"),
}


def test_the_index_follows_labels_images_and_lists(yolo_set: YoloSet) -> None:
    yolo_set.add("images", "labels", "ab")
    before = yolo_set.open("images")
    label = yolo_set.root / "labels" / "a.txt"
    times = label.stat()
    label.write_text(label.read_text().replace("0.25", "0.75"))
    os.utime(label, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert yolo_set.open("images").boxes_xywh[0, 2] == 45 and before.boxes_xywh[0, 2] == 15
    cv2.imwrite(str(yolo_set.root / "images" / "a.jpg"), np.zeros((20, 30, 3), np.uint8))
    assert yolo_set.open("images").sizes[0].tolist() == [20, 30]
    yolo_set.add("images", "labels")
    assert_whole(yolo_set.open("images"))
    (yolo_set.root / "labels" / "b.txt").unlink()
    assert np.diff(yolo_set.open("images").offsets).tolist() == [1, 0, 1]


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


def test_images_of_a_split_have_the_ids_of_predict_and_the_names_of_the_data_yaml(yolo_set: YoloSet) -> None:
    yolo_set.add("images/test", "labels/test")
    for stem, number in zip("abc", ("10", "9", "2"), strict=True):
        for path in yolo_set.root.glob(f"*/test/{stem}.*"):
            path.rename(path.with_stem(number))
    root = yolo_set.write("data.yaml", "train: images/none\nval: images/none\nnames: [x, y, z]\n")
    config = replace(yolo_set.config("images/test"), root=str(root))
    opened = open_annotations(config, "val")
    assert opened.names == ["x", "y", "z"]
    assert [(opened.file_name(i), number) for i, number in enumerate(opened.image_ids.tolist())] == [
        ("images/test/10.jpg", 10), ("images/test/2.jpg", 2), ("images/test/9.jpg", 9),
    ]  # fmt: skip
    assert [opened.names[cls] for cls in opened.classes] == ["x", "z", "y"]


@pytest.mark.parametrize("count", [100, 101])
def test_more_objects_than_are_scored_are_named(count: int, yolo_set: YoloSet) -> None:
    yolo_set.add("images", "labels")
    rows = "".join(f"0 0.5 0.5 0.25 {number / 1000:.3f}\n" for number in range(200, 200 + count))
    yolo_set.write("labels/b.txt", rows + "1 0.5 0.5 0.5 0.5\n" * 50)
    notes = [note for note in yolo_set.open("images", split="val").notes if "100" in note]
    assert len(notes) == (count > 100) and all("(1), first: images/b.jpg" in note for note in notes)


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


def test_a_folder_is_searched_to_the_bottom_in_order(yolo_set: YoloSet) -> None:
    yolo_set.add("images/1/x", "labels/1/x", "a")
    yolo_set.add("images/2", "labels/2", "b")
    yolo_set.add("images/3", "labels/3", "c")
    yolo_set.add("images/.hidden", "labels/.hidden")
    (yolo_set.root / "images" / "3" / "up").symlink_to("../..", target_is_directory=True)
    for kind in ("images", "labels"):
        (yolo_set.root / kind / "2").rename(yolo_set.root / f"{kind}-elsewhere")
        (yolo_set.root / kind / "2").symlink_to(f"../{kind}-elsewhere", target_is_directory=True)
    yolo_set.write("images/notes.txt", "no picture")
    assert_whole(yolo_set.open("images"))
    (yolo_set.root / ".mine").mkdir()
    assert_whole(yolo_set.open("./.mine/../images"))


YAMLS = {
    "folders": "train: images/train\nval: images/train\nnames: [x, y, z]",
    "a path": "path: set\ntrain: images/train\nnames: [x, y, z]\nnc: 3",
    "its own path": "path: {root}\ntrain: images/train\nnames: [x, y, z]",
    "another's path": "path: /elsewhere\ntrain: images/train\nnames: [x, y, z]",
    "an absolute folder": "train: {root}/images/train\nnames: [x, y, z]",
    "a list": "train: train.txt\nnames: [x, y, z]",
    "several": "train: [images/train/1, images/train/2]\nnames: [x, y, z]",
    "names of numbers": "train: images/train\nnames: [7, 010, 1:30]",
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
    assert annotations.names == (["7", "010", "1:30"] if case == "names of numbers" else ["x", "y", "z"])


WRONG_YAMLS = {
    "train: [": r"data\.yaml is not valid YAML",
    "": r"data\.yaml holds no keys",
    "val: images\nnames: [x]": r"data\.yaml names no images under 'train'",
    "train: pictures\nnames: [x]": r"data\.yaml names pictures, but there is no such place .*/set/pictures",
    "train: images\nnames: x": r"data\.yaml: names must be a list of texts, got 'x'",
    "train: images\nnames: {1: x, 2: y}": r"the keys of names are \[1, 2\]. fix: number them from 0",
    "train: images\nnames: [yes, no]": r"must be a list of texts, got .True, False.",
    "train: images\nnames: [x, y, x]": r"lists 'x' twice",
    "train: images\nkpt_shape: [17, 3]\nnames: [x]": r"is for key points",
    "train: images\nnames: [x, y]\nnc: 3": r"data\.yaml holds 2 names for 3 classes",
    "train: images\nnames: {0: x, 1: y, 1: z}": r"not valid YAML \(the key '1' is there 2 times",
    "train: images": r"data\.yaml holds no class names. fix: set data.names",
}


@pytest.mark.parametrize("text", WRONG_YAMLS)
def test_wrong_data_yaml(text: str, yolo_set: YoloSet) -> None:
    yolo_set.add("images", "labels")
    yolo_set.write("data.yaml", text)
    with pytest.raises(DataError, match=WRONG_YAMLS[text]) as caught:
        yolo_set.open("data.yaml", names=None)
    assert "fix: " in str(caught.value) and "\n" not in str(caught.value)


def test_names_choose_and_order_the_classes_of_a_data_yaml(yolo_set: YoloSet) -> None:
    yolo_set.add("images", "labels", "ac")
    yolo_set.write("data.yaml", "train: images\nnames: [x, y, z]")
    annotations = yolo_set.open("data.yaml", names=["z", "x"])
    assert annotations.names == ["z", "x"] and annotations.category_ids.tolist() == [2, 0]
    assert annotations.classes.tolist() == [1, 0], "of a and c, whose labels are 0 and 2"
    with pytest.raises(DataError, match=r"data\.names holds 'w', and the classes of .* are x, y, z"):
        yolo_set.open("data.yaml", names=["x", "w"])
    yolo_set.write("b.yaml", "train: images\nnames: [z, y, x]")
    with pytest.raises(DataError, match=r"the data\.yaml files differ in their names"):
        yolo_set.open(["data.yaml", "b.yaml"], names=None)


def test_what_leads_nowhere(yolo_set: YoloSet) -> None:
    yolo_set.add("images", "elsewhere")
    yolo_set.add("empty", "labels", "")
    yolo_set.write("list.txt", "x/a.jpg\nx/b.jpg\n")
    yolo_set.write("blank.txt", "\n\n")
    for place, message in (
        ("images", r"none of the 3 images .* has a label file .*/set/labels/a\.txt\)"),
        ("empty", r"/empty holds no images"),
        ("list.txt", r"none of the 2 images of .*list\.txt is there \(first: .*/set/x/a\.jpg\)"),
        ("blank.txt", r"blank\.txt holds no images"),
        ("images/a.jpg", r"a\.jpg is not a text file in UTF-8"),
    ):
        with pytest.raises(DataError, match=message):
            yolo_set.open(place)
    with pytest.raises(DataError, match=r"images holds no class names. fix: set data.names"):
        yolo_set.open("images", names=None)


@pytest.mark.parametrize(
    ("images", "labels"),
    [("images", "x.TXT"), ("photos", "labels"), ("photos/train", "labels/train"), ("photos/train", "photos/labels")],
)
def test_a_label_file_is_found_for_each_picture(images: str, labels: str, yolo_set: YoloSet) -> None:
    yolo_set.add("first/images", "first/labels", "a")
    yolo_set.add(f"second/{images}", "second/images" if labels == "x.TXT" else f"second/{labels}", "bc")
    if labels == "x.TXT":
        for stem in "bc":
            path = yolo_set.root / "second" / "images" / f"{stem}.txt"
            path.rename(path.with_suffix(".TXT"))
    assert np.diff(yolo_set.open(".").offsets).tolist() == [1, 1, 1]


def test_files_that_belong_to_nothing_are_named(yolo_set: YoloSet) -> None:
    yolo_set.add("images", "labels", "ab")
    (yolo_set.root / "images" / "a.jpg").rename(yolo_set.root / "images" / "a.jfif")
    assert len(yolo_set.open("images")) == 2 and not yolo_set.open("images").notes
    yolo_set.write("labels/lonely.txt", "0 .5 .5 .1 .1")
    yolo_set.write("images/phone.heic", "")
    (yolo_set.root / "labels" / "b.txt").unlink()
    notes = "\n".join(yolo_set.open("images").notes)
    for what in ("lonely.txt", "phone.heic", "b.jpg"):
        assert what in notes


@pytest.mark.parametrize(
    "row",
    [
        "0 .5 .5 .2 .2 .9 17", "0 .5 .5 .2 .2 .45 .45 .55 .55 .5 .5", "0 .5 .5 .2 .2 .4 .4 2 .6 .6 1",
        "0 .5 .5 .2 .2 .45 .45 .55 .55",
    ],
)  # fmt: skip
@pytest.mark.parametrize("others", ["", "0 .5 .5 .1 .1\n"])
def test_rows_of_trackers_and_key_points_are_not_polygons(row: str, others: str, yolo_set: YoloSet) -> None:
    yolo_set.add("images", "labels", "abc")
    for stem in "abc":
        yolo_set.write(f"labels/{stem}.txt", f"{row}\n{row}\n{others}")
    with pytest.raises(DataError, match=r"a\.txt:1 h"):
        yolo_set.open("images")


@pytest.mark.parametrize("clockwise", [True, False])
def test_a_polygon_stands_for_its_bounding_box_wherever_it_begins(clockwise: bool, yolo_set: YoloSet) -> None:
    yolo_set.add("images", "labels", "abc")
    corners = [".5 .1", ".8 .4", ".3 .9", ".2 .5"][:: 1 if clockwise else -1]
    rows = (f"0 {' '.join(corners[start:] + corners[:start])}\n" for start in range(4))
    yolo_set.write("labels/a.txt", "".join(rows))
    boxes = yolo_set.open("images").boxes_xywh[:4] / [60, 40, 60, 40]
    np.testing.assert_allclose(boxes, [[0.2, 0.1, 0.6, 0.8]] * 4)
