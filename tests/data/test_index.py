"""The index against the json and pycocotools; on disk built once, never half-written."""

import contextlib
import io
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pycocotools.coco import COCO

import data
import data.coco
from data import remote
from tests.data.conftest import DAMAGES


def assert_holds_what_pycocotools_reads(annotations: data.Annotations, path: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        reference = COCO(str(path))
    assert annotations.category_ids.tolist() == sorted(reference.cats)
    assert annotations.names == [reference.cats[number]["name"] for number in sorted(reference.cats)]
    assert annotations.image_ids.tolist() == list(reference.imgs)
    for index, image_id in enumerate(annotations.image_ids.tolist()):
        rows = slice(annotations.offsets[index], annotations.offsets[index + 1])
        expected = reference.imgToAnns[image_id]
        assert annotations.file_name(index) == reference.imgs[image_id]["file_name"]
        assert annotations.boxes_xywh[rows].tolist() == [item["bbox"] for item in expected]
        assert annotations.areas[rows].tolist() == [item["area"] for item in expected]
        assert annotations.crowd[rows].tolist() == [bool(item["iscrowd"]) for item in expected]
        ids = annotations.category_ids[annotations.classes[rows]]
        assert ids.tolist() == [item["category_id"] for item in expected]


def test_index_holds_the_very_numbers_of_the_json(coco_set) -> None:
    coco_set.json["annotations"][0] |= {"iscrowd": 1, "area": 12.3456789}
    coco_set.json["annotations"].reverse()  # boxes may come in another order than images
    assert_holds_what_pycocotools_reads(coco_set.open(), coco_set.root / "instances.json")


def test_names_choose_and_order_the_classes(coco_set) -> None:
    everything = coco_set.open()
    assert everything.names == ["dog", "cat", "bird"]
    chosen = coco_set.open(names=["bird", "dog"], on_error=data.OnError.skip)
    assert chosen.names == ["bird", "dog"] and chosen.category_ids.tolist() == [7, 1]
    kept = everything.category_ids[everything.classes] != 3
    assert np.array_equal(chosen.category_ids[chosen.classes], everything.category_ids[everything.classes][kept])
    with pytest.raises(data.DataError, match=r"category 3, which is not in use"):
        coco_set.open(names=["bird", "dog"])


def test_what_killed_processes_left_is_removed_by_the_next_one(coco_set) -> None:
    index = Path(coco_set.config.index_dir)
    paths = {name: index / f".{name}.{32 * 'a'}.tmp" for name in ("old index", "new index", "old cache", "new cache")}
    for name, path in paths.items():
        (path if "index" in name else index).mkdir(parents=True, exist_ok=True)
        (path / "sizes.npy" if "index" in name else path).touch()
        age = 2 * 86_400 if "old" in name else 3_600
        os.utime(path, (time.time() - age,) * 2)
    foreign = index / ".somebody.tmp"
    foreign.touch()
    os.utime(foreign, (0, 0))
    coco_set.open()
    assert [name for name, path in paths.items() if path.exists()] == ["new index", "new cache"] and foreign.exists()


def test_images_that_arrive_later_are_in_the_next_index(coco_set, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FEW", 1)  # of those at an address, only so many are asked for
    whole = coco_set.open()
    away = [Path(whole.path(index)) for index in (1, 3)]
    for path in away:
        path.rename(f"{path}.away")
    assert len(coco_set.open(on_error=data.OnError.skip)) == len(whole) - 2
    for count, path in enumerate(reversed(away), start=1):
        Path(f"{path}.away").rename(path)
        for _ in range(2):
            assert len(coco_set.open(on_error=data.OnError.skip)) == len(whole) - 2 + count


def test_crowds_and_boxes_in_fractions_are_named(coco_set) -> None:
    for entry in coco_set.json["annotations"][:2]:
        entry["iscrowd"] = 1
    assert any("crowds" in note and "(2)" in note for note in coco_set.open().notes)
    assert not any("crowds" in note for note in coco_set.open("val").notes), "there they count as COCO says"
    for entry in coco_set.json["annotations"]:
        entry["bbox"] = [0.1, 0.1, 0.5, 0.25]
    assert any("fractions" in note for note in coco_set.open().notes)


def test_single_class(coco_set) -> None:
    annotations = coco_set.open(single_class=True)
    assert annotations.names == ["object"] and set(annotations.classes.tolist()) == {0}
    assert len(annotations.category_ids) == 1 and "classes that count as object (3), first: dog" in annotations.notes
    assert coco_set.open().names == ["dog", "cat", "bird"], "an index of its own"
    for number, other in enumerate(({}, {"classes": [0]}, {"exif": data.Exif.ignore}, {"split": 0.3}), start=3):
        coco_set.open(**other, on_error=data.OnError.skip)
        assert len(indices(coco_set)) == number


def test_missing_area_and_iscrowd_have_defaults(coco_set) -> None:
    expected = coco_set.open()
    for record in coco_set.json["annotations"]:
        del record["area"], record["iscrowd"]
    annotations = coco_set.open()
    assert np.array_equal(annotations.areas, expected.areas) and not annotations.crowd.any()


def test_classes_of_both_splits_must_agree(coco_set) -> None:
    train = coco_set.open()
    data.check_same_classes(train, train)
    with pytest.raises(data.DataError, match=r"of 3 and 1 classes. fix: set data.names"):
        data.check_same_classes(train, coco_set.open(single_class=True))
    coco_set.json["categories"][2]["name"] = "fish"
    with pytest.raises(data.DataError, match=r"class 2 is 'bird' in the training set and 'fish'"):
        data.check_same_classes(train, coco_set.open())


def indices(coco_set) -> list[Path]:
    return sorted((coco_set.root / "index").iterdir(), key=lambda path: path.suffix)


def test_opening_again_maps_the_files_and_reads_no_source(coco_set, monkeypatch: pytest.MonkeyPatch) -> None:
    first = coco_set.open()
    monkeypatch.setattr(data.coco, "read_coco", None)
    second = coco_set.open()
    assert len(indices(coco_set)) == 1
    assert np.array_equal(first.boxes_xywh, second.boxes_xywh)
    arrays = [value for value in vars(second).values() if isinstance(value, np.ndarray)]
    assert len(arrays) == 10, "what grows with the images is in arrays"
    assert all(isinstance(array.base, np.memmap) and not array.flags.writeable for array in arrays), (
        "processes share them"
    )


def open_at(config: data.DataConfig, start: float, results: multiprocessing.Queue) -> None:
    """Open index and cache as a training does, and send all that is in them."""
    time.sleep(max(0.0, start - time.time()))
    annotations = data.open_annotations(config, "train")
    files = data.ImageSource(annotations, config.on_error)
    path = Path(config.index_dir) / data.image_cache_name(annotations, config.on_error)
    data.build_image_cache(files, path, data.ImageCache.disk)
    images = data.ImageSource(annotations, config.on_error, path)
    pixels = [images.read(index).tobytes() for index in range(len(annotations))]
    results.put((annotations.boxes_xywh.tolist(), pixels))


def test_processes_that_build_at_once_share_one_index_and_cache(coco_set) -> None:
    coco_set.save()
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    for turn in range(3):
        start = time.time() + 0.05
        processes = [context.Process(target=open_at, args=(coco_set.config, start, results)) for _ in range(4)]
        for process in processes:
            process.start()
        found = [results.get(timeout=20) for _ in processes]
        for process in processes:
            process.join(20)
        boxes, pixels = found[0]
        assert found == [found[0]] * 4 and len(boxes) == len(coco_set.json["annotations"]) and len(pixels) == 7
        index, cache = indices(coco_set)  # no temporary folder stays
        os.truncate(cache if turn % 2 else index / "boxes_xywh.npy", 100)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_index_is_built_anew(coco_set, damage, caplog, monkeypatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # slow

    def arrays(annotations: data.Annotations) -> dict[str, Any]:
        return {name: np.asarray(value).tolist() for name, value in vars(annotations).items()}

    expected = arrays(coco_set.open())
    (folder,) = indices(coco_set)
    files = sorted(folder.iterdir())
    assert len(files) == 12
    for file in files:
        damage(file)
        assert arrays(coco_set.open()) == expected
        assert [record.getMessage() for record in caplog.records] == [
            f"the index {folder} is damaged and will be rebuilt"
        ]
        caplog.clear()
        assert arrays(coco_set.open()) == expected and not caplog.records
        assert indices(coco_set) == [folder], "nothing of the damaged one stays"


def test_a_folder_that_cannot_be_written(coco_set) -> None:
    (coco_set.root / "blocked").touch()
    with pytest.raises(data.DataError, match=r"cannot write the index .* \(Not a directory\).*data.index_dir"):
        coco_set.open(index_dir=str(coco_set.root / "blocked" / "index"))


@pytest.mark.parametrize("on_error", data.OnError)
def test_a_training_set_of_crowds_is_refused(on_error: data.OnError, coco_set) -> None:
    for entry in coco_set.json["annotations"]:
        entry["iscrowd"] = 1
    boxes = len(coco_set.json["annotations"])
    with pytest.raises(data.DataError, match=rf"7 usable images and {boxes} usable boxes, all of them crowds.* fix: "):
        coco_set.open(on_error=on_error)
    assert len(coco_set.open("val", on_error=on_error).crowd) == boxes
    coco_set.json["annotations"][0]["iscrowd"] = 0
    assert coco_set.open(on_error=on_error).crowd.sum() == boxes - 1


@pytest.mark.parametrize("copied", [0, 1, 5])
def test_copies_of_training_images_for_validation_are_a_warning(copied: int, coco_set) -> None:
    names = [entry["file_name"] for entry in coco_set.json["images"] if entry["id"] % 4 != 2]  # they have boxes
    (coco_set.root / "val").mkdir()
    for name in names:
        content = (coco_set.root / "images" / name).read_bytes()
        (coco_set.root / "val" / f"b{name}").write_bytes(content + b" " * (name not in names[:copied]))
    train, same = coco_set.open(), coco_set.open("val")
    for entry in coco_set.json["images"]:
        entry["file_name"] = f"b{entry['file_name']}"
    val = coco_set.open("val", on_error=data.OnError.skip, val=data.SplitConfig("instances.json", "val"))
    warning = data.warn_of_shared_images(train, val)
    assert "7 of 7 " in data.warn_of_shared_images(train, same) and (warning is None) == (copied == 0)
    assert not copied or f"{copied} of 5 validation images are training images, too" in warning
