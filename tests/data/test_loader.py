"""The loader: workers change the speed and nothing else, and signals do not touch them."""

import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

import data
from data.loader import BatchLoader, empty_images
from tests.data.conftest import EVERY_AUGMENT, NO_AUGMENT, sampler_of

GPU = torch.device("cuda", 0)


def load_epoch(coco_set, augment: data.AugmentConfig, workers: int, start_step: int = 0) -> list[data.Batch]:
    source = coco_set.source()
    dataset = data.TrainDataset(source.annotations, source, augment, seed=0, epochs=3)
    sampler = sampler_of(7, 2, data.MultiScale(64, 0.5, 1.5, 32, 0), micro_batch_size=1)
    loader = data.make_loader(dataset, sampler, workers)
    sampler.sampler.set_epoch(1, start_step)
    return list(loader)


def plain_loader(
    coco_set, augment: data.AugmentConfig, workers: int, kind: type[data.TrainDataset] = data.TrainDataset, **more: Any
) -> BatchLoader:
    source = coco_set.source()
    sampler = sampler_of(7, 1)
    return data.make_loader(kind(source.annotations, source, augment, seed=0, epochs=1), sampler, workers, **more)


def tensors(batches: list[data.Batch]) -> list[Tensor]:
    return [tensor for batch in batches for tensor in (batch.images, batch.targets, batch.indices)]


def test_workers_and_the_cursor_do_not_change_samples(coco_set) -> None:
    before = torch.get_rng_state()
    expected = tensors(load_epoch(coco_set, EVERY_AUGMENT, workers=0))
    assert torch.equal(before, torch.get_rng_state()), "the global generator is left alone"
    assert len(expected) == 3 * 6
    for workers in (1, 2):
        found = tensors(load_epoch(coco_set, EVERY_AUGMENT, workers))
        assert all(torch.equal(first, second) for first, second in zip(expected, found, strict=True))
    rest = tensors(load_epoch(coco_set, EVERY_AUGMENT, workers=0, start_step=2))
    assert all(torch.equal(first, second) for first, second in zip(expected[12:], rest, strict=True))


def test_a_pickled_data_set_gives_the_same_samples(coco_set, tmp_path: Path) -> None:
    annotations = coco_set.open()
    data.build_image_cache(data.ImageSource(annotations, data.OnError.stop), tmp_path / "cache", data.ImageCache.disk)
    images = data.ImageSource(annotations, data.OnError.stop, tmp_path / "cache")
    if sys.platform == "linux":
        (tmp_path / "cache").unlink()  # as that of data.cache=ram once all ranks have it open
    for dataset in (
        data.TrainDataset(annotations, images, EVERY_AUGMENT, seed=0, epochs=3),
        data.EvalDataset(annotations, images),
    ):
        received = pickle.loads(pickle.dumps(dataset))
        requests = [data.Request(index, 64, 64, 1) for index in range(7)]
        batch, same = dataset.__getitems__(requests), received.__getitems__(requests)
        assert torch.equal(batch.images, same.images) and torch.equal(batch.targets, same.targets)


def test_an_error_in_a_worker_reaches_the_training_process(coco_set) -> None:
    loader = plain_loader(coco_set, NO_AUGMENT, 1)
    (coco_set.root / "images" / "12.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"12.png is not an image .* fix: "):
        list(loader)
    loader._iterator._shutdown_workers()  # else torch waits 5 s for a worker that had an error


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_on_a_gpu_are_those_of_the_host(coco_set) -> None:
    """While the device is busy, too: what it queued reads a batch after its release."""
    source = coco_set.source()
    augment = replace(EVERY_AUGMENT, colour=data.Colour.device)
    dataset = data.TrainDataset(source.annotations, source, augment, seed=0, epochs=3)
    epochs, busy = [], torch.ones(4096, 4096, device="cuda")
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        sampler = sampler_of(7, 1, data.MultiScale(64, 0.5, 1.5, 32, 0))
        sums = []
        for batch in data.make_loader(dataset, sampler, 2, device):
            assert batch.images.device == batch.targets.device == device
            assert batch.indices.device.type == batch.letterboxes.device.type == "cpu"
            for _ in range(20 if device.type == "cuda" else 0):
                busy = busy @ busy * 1e-4
            sums.append(torch.cat([batch.images.double().sum().view(1), batch.targets.double().sum().view(1)]))
        epochs.append(torch.stack(sums).cpu())
    assert torch.equal(*epochs)


class Stuck(data.TrainDataset):
    signal = signal.SIGSTOP

    def __getitems__(self, requests: Any) -> data.Batch:
        os.kill(os.getpid(), self.signal)
        return super().__getitems__(requests)


class Killed(Stuck):
    """A set whose worker ends as by the kernel when memory runs out."""

    signal = signal.SIGKILL


@pytest.mark.parametrize(
    ("kind", "seconds", "message"),
    [(Stuck, 2, r"gave no batch for 0.8 s. fix: "), (Killed, 60, r"killed.* fix: fewer data\.workers")],
)
def test_a_worker_that_hangs_or_is_killed_ends_the_epoch_with_a_sentence(coco_set, kind, seconds, message) -> None:
    loader = plain_loader(coco_set, NO_AUGMENT, 1, kind=kind, timeout_seconds=seconds)
    with pytest.raises(data.DataError, match=message):
        next(iter(loader))
    assert not any(worker.is_alive() for worker in loader._iterator._workers)


def test_workers_outlive_the_signals_of_others_and_end_by_their_parent_s(coco_set) -> None:
    loader, forks = plain_loader(coco_set, NO_AUGMENT, 2), [True]  # with a thread each, as some libraries start
    os.register_at_fork(after_in_child=lambda: forks and Thread(target=time.sleep, args=(60,), daemon=True).start())
    batches = iter(loader)
    next(batches), next(batches)  # both workers have started
    forks.clear()
    workers = loader._iterator._workers
    for name in ("TERM", "USR1", "USR2", "HUP", "INT"):
        subprocess.run(["kill", f"-{name}", *(str(worker.pid) for worker in workers)], check=True)
    time.sleep(0.2)
    assert sum(1 for _ in batches) == 5 and len(list(loader)) == 7 and all(worker.is_alive() for worker in workers)
    loader._iterator._shutdown_workers()
    assert not any(worker.is_alive() for worker in workers)
    loader = plain_loader(coco_set, NO_AUGMENT, 1)
    next(iter(loader))
    (worker,) = loader._iterator._workers
    worker.terminate()  # as at the end of a program that left its loader open
    worker.join(10)
    assert not worker.is_alive()


def test_the_host_keeps_what_only_it_reads() -> None:
    """Else naming the images of a batch, or mapping back its boxes, would wait for the device."""
    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8).to(memory_format=torch.channels_last)
    host = data.Batch(images, torch.zeros(5, 6), torch.zeros(2).long(), torch.zeros(2, 4).double(), torch.ones(2, 3))
    moved = host.to(torch.device("meta"), non_blocking=True)
    assert {tensor.device.type for tensor in (moved.images, moved.targets, moved.gains)} == {"meta"}
    assert moved.images.is_contiguous(memory_format=torch.channels_last)
    assert moved.indices is host.indices and moved.letterboxes is host.letterboxes
    assert host.images.device.type == "cpu"


def test_full_shared_memory_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(size: int) -> torch.UntypedStorage:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(torch.utils.data, "get_worker_info", object)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", full)
    with pytest.raises(data.DataError, match=r"batch of 2 MB .*No space left.*fix: .*--shm-size=8g"):
        empty_images([data.Request(0, 1000, 600, 0)])
