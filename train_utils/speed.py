"""The time of each stage from file to boxes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

Requests = TypeVar("Requests", bound=Sequence[Any])
STAGES = ("preprocessing", "network", "suppression")
WARM_UP, COUNTED = 3, 30  # batches, if there are that many


@dataclass(frozen=True)
class Speed:
    """Medians over batches of one size, in ms per image, by STAGES."""

    batch_size: int
    batches: int  # counted ones
    milliseconds: dict[str, float]

    def line(self) -> str:
        """One sentence with all figures."""
        parts = ", ".join(f"{stage} {value:.2f}" for stage, value in self.milliseconds.items())
        total = sum(self.milliseconds.values())
        return f"batch {self.batch_size}: {parts}, together {total:.2f} ms per image (median of {self.batches} batches)"


@torch.inference_mode()
def measure_speed(
    batches: Sequence[Requests],
    prepare: Callable[[Requests], Tensor],
    network: Callable[[Tensor], list[Tensor]],
    suppress: Callable[[list[Tensor]], list[Tensor]],
    device: torch.device,
) -> Speed:
    """Time the stages one after another, without overlap.

    ``prepare`` reads images and puts the network's input (B, 3, H, W) on ``device``, ``network``
    gives raw maps, ``suppress`` the detections of each image, on the CPU. Only batches of the
    largest size count; the first WARM_UP also run once uncounted. Each stage ends with a GPU
    synchronisation.
    """
    size = max(len(batch) for batch in batches)
    whole = [batch for batch in batches if len(batch) == size][:COUNTED]
    seconds: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for number, batch in enumerate([*whole[:WARM_UP], *whole]):
        ends = [_now(device)]
        images = prepare(batch)
        ends.append(_now(device))
        raw_maps = network(images)
        ends.append(_now(device))
        suppress(raw_maps)
        ends.append(_now(device))
        if number >= min(WARM_UP, len(whole)):
            for stage, start, end in zip(STAGES, ends, ends[1:], strict=False):
                seconds[stage].append(end - start)
    return Speed(size, len(whole), {s: statistics.median(values) / size * 1e3 for s, values in seconds.items()})


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
