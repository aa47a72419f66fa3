"""Decoded images in shared memory."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
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
        monkeypatch.setattr("data.images.ZEROS", bytes(1000))
    files = [source.read(index) for index in range(len(source.annotations))]
    path = tmp_path / "images"
    build_image_cache(source, path, ImageCache.ram)
    cached = ImageSource(source.annotations, OnError.stop, CachedImages(path, source.annotations))
    path.unlink()  # an open map outlives its name
    assert not list(tmp_path.glob("*images*")), "no temporary file is left"
    shutil.rmtree(coco_set.root / "images")  # what follows comes from the cache
    for index, first in enumerate(files):
        second = cached.read(index)
        assert first is not None and second is not None and np.array_equal(first, second)
        assert not second.flags.writeable, "all processes share these pages"


@pytest.mark.parametrize("reserves", [True, False])
def test_all_room_is_taken_before_the_first_pixel(
    reserves: bool, coco_set, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with holes would crash its writer once the disk is full."""
    source = coco_set.source()
    size = len(source.annotations) + 3 * int(source.annotations.sizes.prod(axis=1).sum())
    found = []

    def look(_: ImageSource, __: int) -> None:
        (temporary,) = tmp_path.glob(".images.*.tmp")
        status = temporary.stat()
        found.append((status.st_size, status.st_blocks * 512 >= size))

    if not reserves:
        monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.setattr(ImageSource, "read", look)
    build_image_cache(source, tmp_path / "images", ImageCache.ram)
    assert found == [(size, True)] * len(source.annotations)


def test_a_finished_cache_is_taken_as_it_is(coco_set, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = coco_set.source()
    path = tmp_path / "images"
    path.write_bytes(b"finished")
    monkeypatch.setattr(ImageSource, "read", None)
    build_image_cache(source, path, ImageCache.ram)
    assert path.read_bytes() == b"finished" and list(tmp_path.glob("*images*")) == [path]


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
    monkeypatch.setattr(ImageSource, "read", None)  # refused before any work
    with pytest.raises(DataError, match=r"data\.cache=ram needs 0\.0 GiB in .* fix: data\.cache=none"):
        build_image_cache(coco_set.source(), tmp_path / "images", ImageCache.ram)
    assert not list(tmp_path.glob("*images*"))


def test_a_disk_that_is_full_after_all(coco_set, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program may take the room between the look at it and the file."""

    def fail(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    monkeypatch.setattr(ImageSource, "read", None)
    with pytest.raises(DataError, match=r"data\.cache=disk cannot write .* \(No space left on device\)"):
        build_image_cache(coco_set.source(), tmp_path / "images", ImageCache.disk)
    assert not list(tmp_path.glob("*images*"))


def test_a_kept_cache_belongs_to_these_very_files(coco_set) -> None:
    annotations = coco_set.open()
    name = kept_cache_name(annotations, OnError.stop)
    assert kept_cache_name(coco_set.open(), OnError.stop) == name != kept_cache_name(annotations, OnError.skip)
    path = Path(annotations.path(3))
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)  # the same pixels, but only reading them would tell
    changed = kept_cache_name(annotations, OnError.stop)
    assert changed != name and changed == kept_cache_name(annotations, OnError.stop)
    assert kept_cache_name(replace(annotations, sizes=annotations.sizes + 1), OnError.stop) != changed
    turned = replace(annotations, turn=annotations.turn._replace(unclear=not annotations.turn.unclear))
    assert kept_cache_name(turned, OnError.stop) != changed
