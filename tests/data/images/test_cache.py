"""Decoded images in shared memory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from data import CachedImages, DataError, ImageCache, ImageSource, OnError, build_image_cache, kept_cache_name


@pytest.mark.parametrize("reserves", [True, False])
def test_cached_images_equal_the_files(
    reserves: bool, coco_set, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a system that cannot reserve room in a file: the room is taken by writing."""
    source = coco_set.source()
    if not reserves:
        monkeypatch.delattr(os, "posix_fallocate")
        monkeypatch.setattr("data.images.cache.ZEROS", bytes(1000))
    path = tmp_path / "images"
    build_image_cache(source, path, ImageCache.ram)
    cached = ImageSource(source.annotations, OnError.stop, CachedImages(path, source.annotations))
    path.unlink()  # an open map outlives its name
    assert sorted(tmp_path.glob("*images*")) == []
    for index in range(len(source.annotations)):
        first, second = source.read(index), cached.read(index)
        assert first is not None and second is not None and np.array_equal(first, second)
        assert not second.flags.writeable


def test_a_finished_cache_is_taken_as_it_is(coco_set, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = coco_set.source()
    build_image_cache(source, tmp_path / "images", ImageCache.ram)
    monkeypatch.setattr(ImageSource, "read", None)
    build_image_cache(source, tmp_path / "images", ImageCache.ram)


def test_broken_images(coco_set, tmp_path: Path) -> None:
    annotations = coco_set.open()
    (coco_set.root / "images" / "12.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"12.png is not an image"):
        build_image_cache(ImageSource(annotations, OnError.stop), tmp_path / "images", ImageCache.ram)
    assert not list(tmp_path.glob("*images*")), "nothing half-written stays"
    build_image_cache(ImageSource(annotations, OnError.skip), tmp_path / "images", ImageCache.ram)
    cache = CachedImages(tmp_path / "images", annotations)
    assert [cache.read(index) is None for index in range(7)] == [index == 2 for index in range(7)]


def test_too_little_memory(coco_set, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**30, 2**30, 1000))
    with pytest.raises(DataError, match=r"data.cache=ram needs 0.0 GiB in .* fix: data.cache=none"):
        build_image_cache(coco_set.source(), tmp_path / "images", ImageCache.ram)
    assert not list(tmp_path.glob("*images*"))


def test_a_kept_cache_belongs_to_these_very_files(coco_set) -> None:
    annotations = coco_set.open()
    name = kept_cache_name(annotations, OnError.stop)
    assert kept_cache_name(coco_set.open(), OnError.stop) == name != kept_cache_name(annotations, OnError.skip)
    path = Path(annotations.path(3))
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)  # the very same pixels, but that is not known without reading them
    assert kept_cache_name(annotations, OnError.stop) != name
