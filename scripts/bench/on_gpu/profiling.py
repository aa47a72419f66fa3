"""Where the time of a step goes, how many kernels it launches, and where it waits."""

from __future__ import annotations

import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler_util import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

from data import Batch
from train_utils.loop.step import OptimiserStep

RANGES = ("loss", "input", "update")  # of the host's time, named as their kind
KINDS = ("convolution", "norm and activation", *RANGES, "rest")
NORM = re.compile(r"batch_norm|leaky_relu|mish|silu|swish|bn_fw|bn_bw", re.IGNORECASE)
CONVOLUTION = re.compile(r"conv|gemm|cutlass|xmma", re.IGNORECASE)
BACKWARD = 1  # the scope of autograd's functions
STEPS = 3


class Shares:
    """Microseconds of a step on the device by kind, and its launches; on a CPU of operators.

    A kernel counts to the range or operator that launched it, in the backward pass to those of the
    forward operator. A fused kernel has the names of what it fuses.
    """

    def __init__(self, step: OptimiserStep, batch: Batch) -> None:
        on_gpu = step.world.device.type == "cuda"
        events = _recorded(step, batch, on_gpu)
        of_loss = {event.sequence_nr for event in events if event.sequence_nr >= 0 and "loss" in _names(event)}
        self.microseconds = dict.fromkeys(KINDS, 0.0)
        for event in events:
            if event.device_type == DeviceType.CPU:
                own = [(event.name, event.self_cpu_time_total)]
                for name, microseconds in [kernel[::2] for kernel in event.kernels] if on_gpu else own:
                    if on_gpu and name in RANGES:  # on the device a range is an event, too
                        continue
                    self.microseconds[_kind(name, event, of_loss)] += microseconds / STEPS
        device = DeviceType.CUDA if on_gpu else DeviceType.CPU
        work = [each for each in events if each.device_type == device and not each.is_user_annotation]
        self.launches = sum(not each.cpu_children for each in work) / STEPS
        self.busy = sum(self.microseconds.values())
        if on_gpu:  # kernels may overlap, and some belong to no operator
            self.busy = _union([(each.time_range.start, each.time_range.end) for each in work]) / STEPS
            unknown = sum(each.time_range.elapsed_us() for each in work) / STEPS - sum(self.microseconds.values())
            self.microseconds["rest"] += unknown


def _recorded(step: OptimiserStep, batch: Batch, on_gpu: bool) -> list[Any]:
    loss, to_input, update = step.loss, step.to_input, record_function("update")(step.update)
    step.loss, step.to_input = record_function("loss")(loss), record_function("input")(to_input)
    try:
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
            for _ in range(STEPS):
                step.add(batch)
                update()
            if on_gpu:
                torch.cuda.synchronize()
    finally:
        step.loss, step.to_input = loss, to_input
    return list(profiler.events() or [])


def _names(event: Any) -> list[str]:
    """The names of an operator and of all around it."""
    return [] if event is None else [event.name, *_names(event.cpu_parent)]


def _kind(name: str, event: Any, of_loss: set[int]) -> str:
    """To which of KINDS the work ``name`` of an operator belongs."""
    names, around = [name, *_names(event)], event
    while around is not None and not (around.scope == BACKWARD and around.sequence_nr >= 0):
        around = around.cpu_parent
    if around is not None and around.sequence_nr in of_loss:
        return "loss"
    ranges = [kind for kind in RANGES if kind in names]
    if not ranges and any(map(NORM.search, names)):
        return "norm and activation"
    return ranges[0] if ranges else "convolution" if any(map(CONVOLUTION.search, names)) else "rest"


def _union(spans: list[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    length, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        length += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return length


def waits(run: Callable[[], object]) -> Counter[str]:
    """Where the host waits for the GPU while ``run`` runs, and how often.

    torch warns of each wait. The place is the innermost line of this project.
    """
    found: Counter[str] = Counter()

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if "called a synchroniz" in str(message):
            frames = [each for each in traceback.extract_stack()[:-1] if "site-packages" not in each.filename]
            inner = [each for each in frames if not each.filename.endswith("warnings.py")][-1]
            found[f"{'/'.join(inner.filename.split('/')[-2:])}:{inner.lineno} {inner.name}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        run()
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
    return found
