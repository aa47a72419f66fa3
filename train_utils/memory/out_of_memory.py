"""The memory of a node, and one clear sentence if a pass runs out of it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from train_utils.errors import TrainError
from train_utils.launch.limits import cgroup_folders
from train_utils.memory.peak import process_peak

GIB = 2**30
CGROUP_FILES = {  # limit, use, and the key of the page cache, by version
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
# From messages of torch's allocators, cuBLAS, cuDNN, NCCL, oneDNN and the C++ library, lowercased.
SIGNS = (
    "out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "alloc_failed",
    "bad_alloc",
)  # fmt: skip
ASKED = re.compile(r"tried to allocate ([\d.]+) ([KMG]iB|bytes)", re.IGNORECASE)
FRAGMENTED = 0.1  # share of a GPU's memory, reserved but not allocated, that is worth a mention


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory: on device or host, from Python or C++."""
    if isinstance(error, TrainError):  # explained already
        return False
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in SIGNS)


@contextmanager
def training_pass(device: torch.device, shape: Sequence[int], accumulate: int) -> Iterator[None]:
    """Turn out-of-memory errors of a training pass into a TrainError.

    ``shape`` (B, 3, H, W) is that of the images; ``accumulate`` passes make a rank's step.
    """
    with _explained(device, "training", shape, lambda: training_fix(shape[0], shape[0] * accumulate)):
        yield


@contextmanager
def detection_pass(device: torch.device, shape: Sequence[int], batch_key: str) -> Iterator[None]:
    """Do the same for a pass without gradients; the option ``batch_key`` sets its batch size."""
    with _explained(device, "detection", shape, lambda: detection_fix(shape[0], batch_key)):
        yield


def training_fix(images: int, images_of_step: int) -> str:
    """What to change: at most half of ``images``, a divisor of a rank's ``images_of_step``."""
    sizes = "a smaller train.image_size or train.multi_scale"
    if images == 1:
        return f"{sizes}, or a smaller model.width"
    half = max(number for number in range(1, images // 2 + 1) if images_of_step % number == 0)
    return f"train.device_batch_size={half} (or auto), or {sizes}"


def detection_fix(images: int, batch_key: str) -> str:
    """What to change if ``batch_key`` sets the number of images."""
    size = f"a smaller {batch_key.replace('batch_size', 'image_size')}"
    return size if images == 1 else f"{batch_key}={images // 2}, or {size}"


def gib(amount: float) -> str:
    """Format a number of bytes in GiB."""
    return f"{amount / GIB:.2f} GiB"


def peak_and_total(device: torch.device) -> tuple[int | None, int]:
    """Peak bytes of this process and total bytes, of the GPU or of the node (cgroup)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    return process_peak(), total_memory()


def total_memory(root: Path = Path("/")) -> int:
    """Bytes of the node, or of this process's smallest cgroup; ``root`` holds proc and sys."""
    return min([_meminfo(root, "MemTotal"), *(limit for limit, _ in _cgroups(root))])


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this node, or this process's cgroup, can still give without swapping."""
    return min([_meminfo(root, "MemAvailable"), *(max(0, limit - used) for limit, used in _cgroups(root))])


@contextmanager
def _explained(device: torch.device, kind: str, shape: Sequence[int], fix: Callable[[], str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise TrainError(out_of_memory_sentence(device, kind, shape, fix(), str(error))) from error


def out_of_memory_sentence(device: torch.device, kind: str, shape: Sequence[int], fix: str, text: str = "") -> str:
    """What ran, how much memory it took and what to change; ``text`` is the error's message."""
    images, (height, width) = shape[0], shape[-2:]
    peak, total = peak_and_total(device)
    asked = ASKED.search(text)
    more = f", and {asked[1]} {asked[2]} more did not fit" if asked else ""
    if asked and asked[2] == "bytes":
        more = f", and {gib(float(asked[1]))} more did not fit"
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if unused > FRAGMENTED * total:
            more += f"; {gib(unused)} are reserved but not allocated, so memory is fragmented"
            fix += ", or PYTORCH_ALLOC_CONF=expandable_segments:True in the environment, unless that is so"
    return (
        f"out of memory on {device} in a {kind} pass of {images} x {height} x {width} (images x height x width): "
        f"{f'the peak was {gib(peak)} of' if peak is not None else 'it has'} {gib(total)}{more}. fix: {fix}"
    )


def _meminfo(root: Path, key: str) -> int:
    path = root / "proc/meminfo"
    if not path.exists():  # not Linux: the machine's total
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines())
    return int(lines[key].split()[0]) * 1024


def _cgroups(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of this process's cgroups (v1 and v2), from its own to the root.

    The page cache does not count as used, because the kernel can reclaim it.
    """
    for folder, version in cgroup_folders("memory", root):
        yield from _cgroup(folder, *CGROUP_FILES[version])


def _cgroup(folder: Path, limit_name: str, used_name: str, cached_key: str) -> Iterator[tuple[int, int]]:
    if not (folder / limit_name).exists() or not (folder / used_name).exists():
        return
    limit = (folder / limit_name).read_text().strip()
    if limit == "max":
        return
    stat = folder / "memory.stat"
    cached = dict(line.split() for line in stat.read_text().splitlines()) if stat.exists() else {}
    yield int(limit), int((folder / used_name).read_text()) - int(cached.get(cached_key, 0))
