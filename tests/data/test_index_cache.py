"""The index on disk: built once, rebuilt when sources change, never visible half-written."""

import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import data.index
from data import DataConfig, DataError, open_annotations


def indices(coco_set) -> list[Path]:
    return sorted((coco_set.root / "index").iterdir())


def test_opening_again_maps_the_files_and_reads_no_source(coco_set, monkeypatch: pytest.MonkeyPatch) -> None:
    first = coco_set.open()
    monkeypatch.setattr(data.index, "read_coco", None)
    second = coco_set.open()
    assert len(indices(coco_set)) == 1
    assert np.array_equal(first.boxes_xywh, second.boxes_xywh)
    assert isinstance(second.boxes_xywh.base, np.memmap) and not second.boxes_xywh.flags.writeable


def test_a_same_size_edit_that_keeps_the_mtime_is_seen(coco_set) -> None:
    before = coco_set.open()
    path = coco_set.root / "instances.json"
    status = path.stat()
    text = path.read_text()
    assert "20.25" in text
    path.write_text(text.replace("20.25", "19.75", 1))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size and path.stat().st_mtime_ns == status.st_mtime_ns
    after = open_annotations(coco_set.config, "train")
    assert after.boxes_xywh[0, 2] == 19.75 and before.boxes_xywh[0, 2] == 20.25


def open_at(config: DataConfig, start: float, results: multiprocessing.Queue) -> None:
    time.sleep(max(0.0, start - time.time()))
    results.put(open_annotations(config, "train").boxes_xywh.tolist())


def test_processes_that_build_at_once_share_one_index(coco_set) -> None:
    coco_set.save()
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    for turn in range(3):
        config = replace(coco_set.config, index_dir=str(coco_set.root / "index" / str(turn)))
        start = time.time() + 0.05
        processes = [context.Process(target=open_at, args=(config, start, results)) for _ in range(4)]
        for process in processes:
            process.start()
        boxes = [results.get(timeout=20) for _ in processes]
        for process in processes:
            process.join(20)
        assert boxes == [boxes[0]] * 4 and len(boxes[0]) == len(coco_set.json["annotations"])
        assert len(os.listdir(config.index_dir)) == 1, "no temporary folder stays"


def test_a_damaged_index_is_an_error_that_names_it(coco_set) -> None:
    coco_set.open()
    (folder,) = indices(coco_set)
    os.truncate(folder / "boxes_xywh.npy", 100)
    with pytest.raises(DataError, match=rf"the index {folder} is damaged .* fix: delete that folder"):
        coco_set.open()


def test_a_folder_that_cannot_be_written(coco_set) -> None:
    (coco_set.root / "blocked").touch()
    with pytest.raises(DataError, match=r"cannot write the index .* \(Not a directory\).*data.index_dir"):
        coco_set.open(index_dir=str(coco_set.root / "blocked" / "index"))
