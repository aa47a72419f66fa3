"""Decoded images in shared memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from data import DataError, ImageSource, OnError, RamCache, build_ram_cache


def test_cached_images_equal_the_files(coco_set, tmp_path: Path) -> None:
    source = coco_set.source()
    path = tmp_path / "images"
    build_ram_cache(source, path)
    cached = ImageSource(source.annotations, OnError.stop, RamCache(path, source.annotations))
    path.unlink()  # an open map outlives its name
    assert sorted(tmp_path.glob("*images*")) == []
    for index in range(len(source.annotations)):
        first, second = source.read(index), cached.read(index)
        assert first is not None and second is not None and np.array_equal(first, second)
        assert not second.flags.writeable


def test_a_finished_cache_is_taken_as_it_is(coco_set, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = coco_set.source()
    build_ram_cache(source, tmp_path / "images")
    monkeypatch.setattr(ImageSource, "read", None)
    build_ram_cache(source, tmp_path / "images")


def test_broken_images(coco_set, tmp_path: Path) -> None:
    annotations = coco_set.open()
    (coco_set.root / "images" / "12.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"12.png is not an image"):
        build_ram_cache(ImageSource(annotations, OnError.stop), tmp_path / "images")
    assert not list(tmp_path.glob("*images*")), "nothing half-written stays"
    build_ram_cache(ImageSource(annotations, OnError.skip), tmp_path / "images")
    cache = RamCache(tmp_path / "images", annotations)
    assert [cache.read(index) is None for index in range(7)] == [index == 2 for index in range(7)]


def test_too_little_memory(coco_set, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**30, 2**30, 1000))
    with pytest.raises(DataError, match=r"data.cache=ram needs 0.0 GiB in .* fix: data.cache=none"):
        build_ram_cache(coco_set.source(), tmp_path / "images")
    assert not list(tmp_path.glob("*images*"))
