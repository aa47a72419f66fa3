"""The shared memory that loader workers may fill, against what the system has."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from torch.utils.data import DataLoader

from data.samples.batch import Batch

AT_HAND = 2  # batches that the training process holds: one in use, one on its way to the device


def shared_memory_note(loader: DataLoader[Batch], pixels: int, processes: int, folder: Path) -> str | None:
    """A warning if the workers of ``loader`` could fill the memory file system ``folder``.

    The images of a batch have up to ``pixels`` pixels together; ``processes`` of this node have
    such a loader. None if there is room. Call it when a cache in memory has been made.
    """
    if loader.num_workers == 0 or not folder.is_dir():
        return None
    assert loader.prefetch_factor is not None
    batch = processes * pixels * 3
    needed = (loader.num_workers * loader.prefetch_factor + AT_HAND) * batch
    disk = shutil.disk_usage(folder)
    if needed <= disk.free:
        return None
    fitting = max(0, (disk.free - AT_HAND * batch) // (loader.prefetch_factor * batch))
    return (
        f"loader workers may hold {needed / 1e6:,.0f} MB in {folder}, where {disk.free / 1e6:,.0f} MB are free; a "
        f"batch without room ends the training. fix: make it larger (in a container: --shm-size="
        f"{math.ceil((disk.used + needed) / 2**30)}g), or data.workers={fitting}"
    )
