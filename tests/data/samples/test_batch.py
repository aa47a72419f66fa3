"""The memory of a batch."""

from __future__ import annotations

import pytest
import torch

from data import DataError
from data.samples import batch
from data.samples.plan import Request


def test_full_shared_memory_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(size: int) -> torch.UntypedStorage:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(batch, "get_worker_info", object)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", full)
    with pytest.raises(DataError, match=r"batch of 2 MB .*No space left.*fix: .*--shm-size=8g"):
        batch.empty_images([Request(0, 1000, 600, 0)])
