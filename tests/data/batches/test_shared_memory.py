"""What loader workers may hold in shared memory, told at the start."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data import shared_memory_note

MB = 10**6


def loader(workers: int) -> Any:
    return SimpleNamespace(num_workers=workers, prefetch_factor=4 if workers else None)


def with_space(patch: pytest.MonkeyPatch, used: int, free: int) -> None:
    patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=used + free, used=used, free=free))


def test_a_container_with_64_mb_hears_what_to_change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_space(monkeypatch, 0, 64 * MB)
    pixels = 16 * 640 * 640  # 19.7 MB
    note = shared_memory_note(loader(8), pixels, 1, tmp_path)
    assert note is not None and "may hold 668 MB" in note and "where 64 MB are free" in note
    assert note.endswith("--shm-size=1g), or data.workers=0")
    fewer = shared_memory_note(loader(8), pixels // 16, 2, tmp_path)  # 2 x 1.2 MB
    assert fewer is not None and fewer.endswith("data.workers=6")


def test_the_number_of_workers_in_the_advice_fits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_space(monkeypatch, 700 * MB, 64 * MB)
    assert shared_memory_note(loader(7), 32 * 32 * 600, 1, tmp_path) is None
    note = shared_memory_note(loader(9), 32 * 32 * 600, 1, tmp_path)
    assert note is not None and note.endswith("data.workers=8")
    assert shared_memory_note(loader(8), 32 * 32 * 600, 1, tmp_path) is None
    assert "--shm-size=1g" in note, "with what a cache takes"


def test_nothing_is_told_where_nothing_is_shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_space(monkeypatch, 0, 0)
    assert shared_memory_note(loader(0), 10**9, 1, tmp_path) is None
    assert shared_memory_note(loader(8), 10**9, 1, tmp_path / "missing") is None
