"""What is read from YOLO labels and images, and when their index is rebuilt."""

from __future__ import annotations

import os
from pathlib import Path

import cv2
import numpy as np
import pytest

from conf.entry import compose
from conf.schema import TrainConfig
from data import DataError, ImageSource, open_annotations
from data.yolo import read_label_file
from tests.data.yolo_set import YoloSet, assert_whole


def test_more_pictures_than_are_read_at_a_time(yolo_set: YoloSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.files.CHUNK", 2)
    yolo_set.add("images", "labels")
    assert_whole(yolo_set.open("images"))
    (yolo_set.root / "labels" / "c.txt").write_text("7 .5 .5 .5 .5")
    with pytest.raises(DataError, match=r"labels/c\.txt:1 is of class 7"):
        yolo_set.open("images")


def test_any_name_that_a_file_can_have(yolo_set: YoloSet) -> None:
    yolo_set.add("images", "labels")
    odd = [b"a b  c", "ä 漢字 ☃".encode(), b"latin-\xe9\xff", b"x.y.z", b"#1 'q' \"d\" %20 $HOME"]
    for folder, suffix in ((b"images", b".jpg"), (b"labels", b".txt")):
        for name in odd:
            path = os.fsencode(yolo_set.root) + b"/" + folder
            os.link(path + b"/a" + suffix, path + b"/" + name + suffix)
    folder = yolo_set.open("images")
    (yolo_set.root / "list.txt").write_bytes(b"".join(b"images/%s.jpg\n" % name for name in odd))
    listed = yolo_set.open("list.txt")
    assert len(folder) == 3 + len(odd) and len(listed) == len(odd)
    assert [os.fsencode(Path(listed.path(index)).stem) for index in range(len(odd))] == odd
    source = ImageSource(listed, yolo_set.config("list.txt").on_error)
    for index in range(len(odd)):
        image = source.read(index)
        assert image is not None and image.shape == (40, 60, 3) and len(listed.training_boxes(index)[1]) == 1
    picture = Path(listed.path(2))
    picture.unlink()
    with pytest.raises(DataError, match=r"images/latin-\\udce9\\udcff\.jpg does not exist"):
        source.read(2)
    os.link(listed.path(0), picture)
    label = yolo_set.root / "labels" / os.fsdecode(b"latin-\xe9\xff.txt")
    label.unlink()
    label.write_text("5 .5 .5 .5 .5")
    with pytest.raises(DataError, match=r"labels/latin-\\udce9\\udcff\.txt:1 is of class 5"):
        yolo_set.open("list.txt")


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


def test_opening_again_reads_neither_labels_nor_images(yolo_set: YoloSet, monkeypatch: pytest.MonkeyPatch) -> None:
    yolo_set.add("images", "labels")
    yolo_set.open("images")
    monkeypatch.setattr("data.yolo.read_header_of", None)
    monkeypatch.setattr("data.yolo.read_label_file", None)
    assert_whole(yolo_set.open("images"))


def test_boxes_are_those_in_pixels_within_the_rounding_of_the_text(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    height, width = 427, 640
    low = generator.uniform(0, 0.9, (500, 2))
    high = low + generator.uniform(0, 1, (500, 2)) * (1 - low)
    expected = np.concatenate([low, high - low], axis=1) * [width, height, width, height]
    rows = np.concatenate([(low + high) / 2, high - low], axis=1)
    tmp_path.joinpath("a.txt").write_text("".join(f"3 {' '.join(f'{v:.6f}' for v in row)}\n" for row in rows))
    read, problems = read_label_file(str(tmp_path / "a.txt"))
    assert problems == [] and [row[:2] for row in read] == [[number, 3] for number in range(1, 501)]
    fractions = np.array(read)[:, 2:]
    boxes = np.concatenate([fractions[:, :2] - fractions[:, 2:] / 2, fractions[:, 2:]], axis=1)
    np.testing.assert_allclose(boxes * [width, height, width, height], expected, atol=1e-3)


def test_a_set_of_ones_own_is_one_file_outside_the_repository(yolo_set: YoloSet) -> None:
    yolo_set.add("images", "labels")
    yolo_set.write("data.yaml", "train: images\nval: images\nnames: [x, y, z]")
    yolo_set.write(
        "mine/data/own.yaml", f"defaults: [yolo]\nname: own\nroot: {yolo_set.root}\nindex_dir: {yolo_set.root}/index\n"
    )
    search = f"hydra.searchpath=[file://{yolo_set.root}/mine]"
    config = compose("train", TrainConfig, ["data=own", search]).data
    for split in ("train", "val"):
        assert_whole(open_annotations(config, split))
    config = compose(
        "train", TrainConfig, ["data=own", search, "data.train={annotations: images}", "data.names=[x,y,z]"]
    ).data
    assert_whole(open_annotations(config, "train"))
