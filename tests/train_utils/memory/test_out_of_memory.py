"""What counts as out of memory, what users read then, and how much memory a node has left."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from train_utils.errors import TrainError
from train_utils.memory import out_of_memory as memory
from train_utils.memory.out_of_memory import (
    GIB,
    available_memory,
    detection_pass,
    is_out_of_memory,
    total_memory,
    training_fix,
    training_pass,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
# As torch 2 words them.
OF_CPU = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "21474836480 bytes. Error code 12 (Cannot allocate memory)"
)
OF_GPU = (
    "CUDA out of memory. Tried to allocate 1.25 GiB. GPU 1 has a total capacity of 79.11 GiB of which 900.00 MiB is "
    "free. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 6.00 GiB is reserved by PyTorch but "
    "unallocated."
)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError(OF_GPU),
        RuntimeError(OF_GPU),  # as DDP's hooks pass it on
        RuntimeError(OF_CPU),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("NCCL error ... Cuda failure 2 'out of memory'"),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_what_is_out_of_memory(error: Exception) -> None:
    assert is_out_of_memory(error)
    with pytest.raises(TrainError, match=r"^out of memory on cpu in a training pass of 4 x 64 x 96 "):
        with training_pass(CPU, (4, 3, 64, 96), 2):
            raise error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Connection closed by peer [127.0.0.1]:5000"),
        TrainError("out of memory on cpu in a training pass"),
        ValueError("out of memory"),
        OSError(errno.ENOSPC, "No space left on device"),
        KeyError("x"),
    ],
)
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)) as raised, detection_pass(CPU, (1, 3, 64, 64), "batch_size"):
        raise error
    assert raised.value is error


def told(error: Exception, images: int = 16, accumulate: int = 1, device: torch.device = CPU) -> str:
    with pytest.raises(TrainError) as raised, training_pass(device, (images, 3, 480, 640), accumulate):
        raise error
    assert raised.value.__cause__ is error, "debug=true shows where it was"
    return str(raised.value)


def test_the_sentence_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "peak_and_total", lambda _: (3 * GIB, 8 * GIB))
    assert told(RuntimeError(OF_CPU)) == (
        "out of memory on cpu in a training pass of 16 x 480 x 640 (images x height x width): the peak was 3.00 GiB of "
        "8.00 GiB, and 20.00 GiB more did not fit. fix: train.device_batch_size=8 (or auto), or a smaller "
        "train.image_size or train.multi_scale"
    )
    assert told(MemoryError(), images=1).endswith(
        "3.00 GiB of 8.00 GiB. fix: a smaller train.image_size or train.multi_scale, or a smaller model.width"
    )


def test_the_peak_on_a_cpu_is_that_of_this_process() -> None:
    before, total = memory.peak_and_total(CPU)
    block = torch.ones(before // 4 + 2**27)
    peak, _ = memory.peak_and_total(CPU)
    assert 0.9 * block.nbytes < peak < total


@pytest.mark.parametrize(("reserved", "fragmented"), [(76, True), (71, False)])
def test_the_sentence_on_a_gpu(monkeypatch: pytest.MonkeyPatch, reserved: int, fragmented: bool) -> None:
    figures: dict[str, Callable[[torch.device], Any]] = {
        "max_memory_allocated": lambda _: 72 * GIB,
        "memory_allocated": lambda _: 64 * GIB if fragmented else 70 * GIB,
        "memory_reserved": lambda _: reserved * GIB,
        "get_device_properties": lambda _: type("Properties", (), {"total_memory": 80 * GIB}),
    }
    for name, function in figures.items():
        monkeypatch.setattr(torch.cuda, name, function)
    text = told(torch.OutOfMemoryError(OF_GPU), device=GPU)
    assert "on cuda:1 in a training pass of 16 x 480 x 640" in text
    assert "the peak was 72.00 GiB of 80.00 GiB, and 1.25 GiB more did not fit" in text
    assert ("12.00 GiB are reserved but not allocated, so memory is fragmented" in text) is fragmented
    assert ("expandable_segments" in text) is fragmented


@pytest.mark.parametrize(
    ("images", "of_step", "half"), [(16, 64, 8), (64, 64, 32), (9, 9, 3), (5, 5, 1), (6, 12, 3), (10, 30, 5), (2, 2, 1)]
)
def test_the_smaller_batch_divides_the_step_evenly(images: int, of_step: int, half: int) -> None:
    assert training_fix(images, of_step).startswith(f"train.device_batch_size={half} (or auto), ")


@pytest.mark.parametrize(
    ("key", "images", "fix"),
    [
        ("evaluate.batch_size", 8, "evaluate.batch_size=4, or a smaller evaluate.image_size"),
        ("batch_size", 3, "batch_size=1, or a smaller image_size"),
        ("evaluate.batch_size", 1, "a smaller evaluate.image_size"),
    ],
)
def test_detection_names_its_own_options(key: str, images: int, fix: str) -> None:
    with pytest.raises(TrainError) as raised, detection_pass(CPU, (images, 3, 64, 64), key):
        raise MemoryError
    assert str(raised.value).endswith(f" fix: {fix}")


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


MEMINFO = f"MemTotal:       {64 * 2**20} kB\nMemFree:        1024 kB\nMemAvailable:   {48 * 2**20} kB"
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"
UNLIMITED = 9223372036854771712  # what version 1 has where nobody set a limit


@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        ({}, 64, 48),
        ({"proc/self/cgroup": "0::/"}, 64, 48),
        (  # SLURM and systemd: the limit stands at a parent; 2 of the 10 GiB in use are files that can go
            {
                "proc/self/cgroup": "0::/job_7/step_0",
                f"{V2}/job_7/memory.max": 16 * GIB,
                f"{V2}/job_7/memory.current": 10 * GIB,
                f"{V2}/job_7/memory.stat": f"anon {8 * GIB}\ninactive_file {2 * GIB}",
                f"{V2}/job_7/step_0/memory.max": "max",
                f"{V2}/job_7/step_0/memory.current": 9 * GIB,
            },
            16,
            8,
        ),
        (  # a container sees its host's path, and its own cgroup as the top
            {
                "proc/self/cgroup": "9:cpu:/\n4:memory:/docker/abc\n0::/",
                f"{V1}/memory.limit_in_bytes": 6 * GIB,
                f"{V1}/memory.usage_in_bytes": 5 * GIB,
                f"{V1}/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}",
            },
            6,
            2,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,memory:/a",
                f"{V1}/a/memory.limit_in_bytes": UNLIMITED,
                f"{V1}/a/memory.usage_in_bytes": 5 * GIB,
                f"{V1}/memory.limit_in_bytes": 4 * GIB,
                f"{V1}/memory.usage_in_bytes": 5 * GIB,
            },
            4,
            0,
        ),
    ],
)
def test_what_a_node_has(tmp_path: Path, files: dict[str, object], total: int, available: int) -> None:
    root = write(tmp_path, {"proc/meminfo": MEMINFO, **files})
    assert total_memory(root) == total * GIB
    assert available_memory(root) == available * GIB


def test_what_this_node_has() -> None:
    assert 0 < available_memory() <= total_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_without_linux_all_that_the_machine_has(tmp_path: Path) -> None:
    assert total_memory(tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
