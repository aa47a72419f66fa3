"""The memory of a batch."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from data import Batch, DataError, batch
from data.plan import Request


def test_the_host_keeps_what_only_it_reads() -> None:
    """Else naming the images of a batch, or mapping back its boxes, would wait for the device."""
    with FakeTensorMode():
        images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8).to(memory_format=torch.channels_last)
        host = Batch(images, torch.zeros(5, 6), torch.zeros(2).long(), torch.zeros(2, 4).double(), torch.ones(2, 3))
        moved = host.to(torch.device("cuda", 0), non_blocking=True)
    assert {tensor.device.type for tensor in (moved.images, moved.targets, moved.gains)} == {"cuda"}
    assert moved.images.is_contiguous(memory_format=torch.channels_last)
    assert moved.indices is host.indices and moved.letterboxes is host.letterboxes
    assert host.images.device.type == "cpu"


def test_full_shared_memory_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(size: int) -> torch.UntypedStorage:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(batch, "get_worker_info", object)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", full)
    with pytest.raises(DataError, match=r"batch of 2 MB .*No space left.*fix: .*--shm-size=8g"):
        batch.empty_images([Request(0, 1000, 600, 0)])
