"""How much memory a node has left, and one sentence for people where a pass found too little of it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from train_utils.errors import TrainError

GIB = 2**30
# In messages of torch's allocators, cuBLAS, cuDNN, NCCL, oneDNN and the C++ library; in lower case.
SIGNS = (
    "out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "alloc_failed",
    "bad_alloc",
)  # fmt: skip
ASKED = re.compile(r"tried to allocate ([\d.]+) ([KMG]iB|bytes)", re.IGNORECASE)
FRAGMENTED = 0.1  # share of a GPU's memory that may be reserved but not allocated before that is worth a word


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory could not be had: on a device or on the host, from Python or from C++."""
    if isinstance(error, TrainError):  # has its sentence already
        return False
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in SIGNS)


@contextmanager
def training_pass(device: torch.device, shape: Sequence[int], accumulate: int) -> Iterator[None]:
    """Around a training pass of images ``shape`` (B, 3, H, W), of which ``accumulate`` make a step of one process.

    Raises TrainError in place of the error where memory runs out inside.
    """
    with _explained(device, "training", shape, lambda: training_fix(shape[0], shape[0] * accumulate)):
        yield


@contextmanager
def detection_pass(device: torch.device, shape: Sequence[int], batch_key: str) -> Iterator[None]:
    """The same around a pass without gradients; ``batch_key`` is the option that gives its number of images."""
    with _explained(device, "detection", shape, lambda: detection_fix(shape[0], batch_key)):
        yield


def training_fix(images: int, images_of_step: int) -> str:
    """What to change: at most half of ``images`` that divides ``images_of_step``, those of one process, evenly."""
    sizes = "a smaller train.image_size or train.multi_scale"
    if images == 1:
        return f"{sizes}, or a smaller model.width"
    half = max(number for number in range(1, images // 2 + 1) if images_of_step % number == 0)
    return f"train.device_batch_size={half} (or auto), or {sizes}"


def detection_fix(images: int, batch_key: str) -> str:
    """What to change, where ``batch_key`` gives the number of images."""
    size = f"a smaller {batch_key.replace('batch_size', 'image_size')}"
    return size if images == 1 else f"{batch_key}={images // 2}, or {size}"


def gib(amount: float) -> str:
    """A number of bytes in GiB."""
    return f"{amount / GIB:.2f} GiB"


def peak_and_total(device: torch.device) -> tuple[int | None, int]:
    """The most bytes that this process has had at a time, and those there are: of the GPU, or of the node (cgroup)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    return process_peak(), total_memory()


def process_peak() -> int | None:
    """The most bytes of memory that this process has had at a time; None where the system does not count them."""
    with suppress(ImportError):
        import resource  # not every system has it

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return None


def total_memory(root: Path = Path("/")) -> int:
    """Bytes of memory of the node, or of the smallest cgroup that this process is in; ``root`` holds proc and sys."""
    return min([_meminfo(root, "MemTotal"), *(limit for limit, _ in _cgroups(root))])


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that programs of this node, or of this process's cgroup, can still be given without swapping."""
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
    """What was run, how much memory that took and what to change; ``text`` is the message of the error."""
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
            fix += ", or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"
    return (
        f"out of memory on {device} in a {kind} pass of {images} x {height} x {width} (images x height x width): "
        f"{f'the peak was {gib(peak)} of' if peak is not None else 'it has'} {gib(total)}{more}. fix: {fix}"
    )


def _meminfo(root: Path, key: str) -> int:
    path = root / "proc/meminfo"
    if not path.exists():  # not Linux: all that the machine has
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines())
    return int(lines[key].split()[0]) * 1024


def _cgroups(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use in bytes of the cgroups, of version 1 and 2, that this process is in, from its own to the root.

    Files that were read and are kept in memory for the next time are not counted: they go where memory is wanted.
    A container may see the paths of its host; then only the top, its own cgroup, is found.
    """
    membership = root / "proc/self/cgroup"
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            tops, names = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            tops = ["sys/fs/cgroup/memory"]
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for top in tops:
            for depth in range(len(parts), -1, -1):
                yield from _cgroup(root.joinpath(top, *parts[:depth]), *names)


def _cgroup(folder: Path, limit_name: str, used_name: str, cached_key: str) -> Iterator[tuple[int, int]]:
    if not (folder / limit_name).exists() or not (folder / used_name).exists():
        return
    limit = (folder / limit_name).read_text().strip()
    if limit == "max":
        return
    stat = folder / "memory.stat"
    cached = dict(line.split() for line in stat.read_text().splitlines()) if stat.exists() else {}
    yield int(limit), int((folder / used_name).read_text()) - int(cached.get(cached_key, 0))
