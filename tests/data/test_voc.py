"""The same images in two formats give the same index."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

from conf.compose import compose
from conf.schema import TrainConfig
from data import Annotations, DataConfig, DataError, DataFormat, OnError, SplitConfig, open_annotations
from tests.data.bad_inputs import voc_text
from tests.data.sets import config_of

ARRAYS = ("image_ids", "sizes", "offsets", "boxes_xywh", "classes", "crowd", "areas", "category_ids")


@pytest.fixture
def data_config(tmp_path: Path) -> Callable[..., DataConfig]:
    """The options of ``data=<choice> key=value ...``, with the index in the test's folder."""

    def composed(choice: str, root: Path, *overrides: str) -> DataConfig:
        given = [f"data={choice}", f"data.root={root}", f"data.index_dir={tmp_path / 'index'}", *overrides]
        return compose("train", TrainConfig, given).data

    return composed


def assert_same_images(first: Annotations, second: Annotations) -> None:
    assert len(first) == len(second) and first.names == second.names
    assert np.array_equal(first.sizes, second.sizes)
    assert [first.path(index) for index in range(len(first))] == [second.path(index) for index in range(len(second))]


def test_bccd_as_json_and_as_xml(shared_dir: Path, data_config: Callable[..., DataConfig]) -> None:
    root = shared_dir / "data" / "bccd"
    as_json, as_voc = data_config("bccd", root), data_config("bccd_voc", root)
    for split, images, bad_file in (("train", 205, "BloodImage_00343"), ("val", 87, "BloodImage_00338")):
        first = open_annotations(as_json, split)
        second = open_annotations(as_voc, split)
        assert len(first) == images and first.skipped == []
        assert_same_images(first, second)
        if split == "train":
            assert second.skipped[0] == "left out: boxes without area (1)" and bad_file in second.skipped[1]
            for name in ARRAYS:
                assert np.array_equal(getattr(first, name), getattr(second, name)), name
        else:  # the json lacks an object of the xml
            assert second.skipped == [] and any("without area" in note and bad_file in note for note in second.notes)
            kept = (second.boxes_xywh[:, 2:] > 0).all(axis=1)
            assert (~kept).sum() == 1 and np.array_equal(first.boxes_xywh, second.boxes_xywh[kept])
            assert np.array_equal(first.classes, second.classes[kept])


def voc_devkit(root: Path) -> None:
    """Two images in each list of ``data=voc``; ``<filename>`` often is incomplete or wrong."""
    difficult = voc_text().replace("<bndbox>", "<difficult>1</difficult><truncated>1</truncated><bndbox>")
    for year, name, stems in (("2007", "trainval", "ab"), ("2007", "test", "cd"), ("2012", "trainval", "ae")):
        folder = root / f"VOC{year}"
        for part in ("Annotations", "JPEGImages", "ImageSets/Main"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        for stem in stems:
            assert cv2.imwrite(str(folder / "JPEGImages" / f"{stem}.jpg"), np.zeros((40, 60, 3), np.uint8))
            (folder / "Annotations" / f"{stem}.xml").write_text(difficult.replace("b.png", stem))
        (folder / "ImageSets" / "Main" / f"{name}.txt").write_text("".join(f"{stem}\n" for stem in stems))


def test_voc_is_2007_and_2012_in_their_official_folders(tmp_path: Path, data_config: Callable[..., DataConfig]) -> None:
    voc_devkit(tmp_path / "VOCdevkit")
    config = data_config("voc", tmp_path / "VOCdevkit")
    train, val = open_annotations(config, "train"), open_annotations(config, "val")
    assert [train.file_name(index) for index in range(4)] == [
        f"VOC{year}/JPEGImages/{stem}.jpg"
        for year, stem in (("2007", "a"), ("2007", "b"), ("2012", "a"), ("2012", "e"))
    ]
    assert all(Path(train.path(index)).is_file() for index in range(4)) and train.image_ids.tolist() == [1, 2, 3, 4]
    assert [Path(val.path(index)).name for index in range(2)] == ["c.jpg", "d.jpg"]
    assert len(train.names) == 20 and train.names[train.classes[0]] == "cat"
    assert train.boxes_xywh.tolist() == [[15, 10, 30, 20]] * 4 and not train.crowd.any(), "difficult ones count"
    assert "marked difficult, which count as others do (4)" in " ".join(train.notes)
    label = tmp_path / "VOCdevkit" / "VOC2012" / "Annotations" / "e.xml"
    label.write_text(label.read_text().replace("<xmax>45", "<xmax>55"))
    assert open_annotations(config, "train").boxes_xywh[3].tolist() == [15, 10, 40, 20], "an xml file was changed"


def test_hidden_files_do_not_count_and_a_folder_of_broken_ones_is_named(tmp_path: Path) -> None:
    root = tmp_path / "set"
    for folder in ("JPEGImages", "Annotations/.ipynb_checkpoints"):
        (root / folder).mkdir(parents=True)
    (root / "Annotations" / "._a.xml").write_bytes(b"\0\5\x16\7")
    (root / "Annotations" / ".ipynb_checkpoints" / "a-checkpoint.xml").write_text("<annotation/>")
    config = config_of(root, DataFormat.voc, "Annotations", ".", ["cat"])
    with pytest.raises(DataError, match=r"/Annotations holds none\. fix: "):
        open_annotations(config, "train")
    (root / "Annotations" / "a.xml").write_text("<annotation>")
    for on_error in (OnError.stop, OnError.skip):
        with pytest.raises(DataError, match=r"/Annotations/a\.xml is not valid XML .*\. fix: "):
            open_annotations(replace(config, on_error=on_error), "train")


def test_options_that_do_not_go_with_a_format(coco_set) -> None:
    two = SplitConfig(["a.json", "b.json"], "images")
    with pytest.raises(ValueError, match=r"data.val.annotations lists 2 files: format=coco reads one. fix: merge them"):
        replace(coco_set.config, val=two)
    for wrong in (7, [], ["a", 7], None):
        with pytest.raises(ValueError, match=r"data.train.annotations must be a path or a list of paths, got"):
            replace(coco_set.config, train=SplitConfig(wrong, "images"))
    for changes, said in (
        ({"format": DataFormat.shapes}, r"data.format=shapes needs data.shapes"),
        ({"format": DataFormat.voc}, r"data.format=voc needs data.names"),
        ({"names": []}, r"data.names must be a list"),
    ):
        with pytest.raises(ValueError, match=said):
            replace(coco_set.config, **changes)
    assert replace(coco_set.config, format=DataFormat.voc, names=["cat"], on_error=OnError.skip, val=two).val == two
