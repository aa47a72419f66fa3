"""Counts what would make the host wait for an accelerator, and what it would launch there.

    with HostReads() as counted:
        step.add(batch)
    assert not counted.reads, counted

It works on CPU tensors, as if each were on the device, so no GPU is needed. Tensors that would lie
on the host are named: ``HostReads(batch.indices)``. It sees the operators of its own thread, those
of backward passes included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

# Their result, or its size, is a number that the host has to know.
READING = set(
    """aten::_local_scalar_dense aten::nonzero aten::bincount aten::masked_select aten::equal aten::_unique
    aten::_unique2 aten::unique_dim aten::unique_consecutive aten::unique_dim_consecutive aten::histc
    torchvision::nms""".split()
)
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
# They move whole tensors, which on CPU tensors leaves no operator to see.
TO_HOST = {Tensor.cpu, Tensor.tolist}
FROM_HOST = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
# No kernel runs. What returns a view of its argument is found by its schema.
NO_LAUNCH = (
    *("aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::_local_scalar_dense", "aten::lift_fresh"),
    *("profiler::", "c10d::"),
)


class HostReads(TorchDispatchMode):
    """Within the context it notes ``reads``, ``copies`` and ``launches``, by operator.

    ``reads``: reads of a value or size by the host, and copies of a tensor to it that block.
    ``copies``: of Python numbers to the device, which block as well. ``launches``: operators that
    start a kernel; one of torch's multi-tensor operators counts once.
    """

    def __init__(self, *on_host: Tensor) -> None:
        super().__init__()
        self.on_host = on_host
        self.reads: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self._calls = _Calls(self)

    def __repr__(self) -> str:
        launched = ", ".join(f"{name} {count}" for name, count in self.launches.most_common(12))
        return f"reads {dict(self.reads)}, copies {dict(self.copies)}, {self.launches.total()} launches: {launched}"

    def __enter__(self) -> HostReads:
        super().__enter__()
        self._calls.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.__exit__(kind, error, trace)
        super().__exit__(kind, error, trace)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and func._can_decompose():  # else it arrives as its parts
            with self, torch._C.DisableTorchFunction():
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        name = func._schema.name
        if name in READING or (name in INDEXING and _by_mask(args)) or _repeats_unknown(name, args, kwargs):
            self.reads[name] += 1
        returned = [one.alias_info for one in func._schema.returns]
        if not name.startswith(NO_LAUNCH) and not any(alias and not alias.is_write for alias in returned):
            self.launches[name] += 1
        return func(*args, **kwargs)


class _Calls(TorchFunctionMode):
    """Sees torch's functions above the operators."""

    def __init__(self, counted: HostReads) -> None:
        super().__init__()
        self._counted = counted

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to_host = func in TO_HOST or (func is Tensor.to and "cpu" in (*args[1:], *kwargs.values()))
        if to_host and not kwargs.get("non_blocking") and all(args[0] is not one for one in self._counted.on_host):
            self._counted.reads[resolve_name(func) or str(func)] += 1
        elif func in FROM_HOST and not isinstance(args[0], Tensor):
            self._counted.copies[resolve_name(func) or str(func)] += 1
        return func(*args, **kwargs)


def _by_mask(args: Any) -> bool:
    """Whether a mask is among the indices, so that its true elements have to be counted."""
    masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    filled = len(args) > 2 and args[2].numel() == 1  # one value under a mask is filled in without counting
    return masked and not filled


def _repeats_unknown(name: str, args: Any, kwargs: Any) -> bool:
    return name == "aten::repeat_interleave" and kwargs.get("output_size") is None and isinstance(args[0], Tensor)
