"""The most memory that this process, or its part on the GPU, has needed."""

from __future__ import annotations

import sys
from contextlib import suppress


def process_peak() -> int | None:
    """Peak bytes of memory of this process; None if the system does not count them."""
    with suppress(ImportError):
        import resource  # Unix only

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return None


def device_peak() -> int | None:
    """Peak bytes of the GPU in use, else of this process; None if unknown.

    It imports no torch: without it no GPU is in use.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return process_peak()
