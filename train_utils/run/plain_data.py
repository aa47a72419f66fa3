"""Plain data: what a checkpoint may hold, copied off the device, and its digest."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from train_utils.errors import CheckpointError


def to_plain(value: Any, key: str = "state", copied: bool = False) -> Any:
    """Plain data with tensors detached, contiguous, on the CPU and without unused storage.

    With ``copied`` the result shares no memory with ``value``, which training keeps changing.
    Raises CheckpointError that names the entry, below ``key``, that is not plain data.
    """
    if isinstance(value, Tensor):
        tensor = value.detach().cpu().contiguous()
        # torch would save a view's whole storage.
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        shared = tensor.data_ptr() == value.data_ptr()
        return tensor.clone() if not whole or (copied and shared) else tensor
    if isinstance(value, dict):
        for name in value:
            if type(name) not in (str, int):
                raise CheckpointError(f"{key} has a key of type {type(name).__name__}. fix: use str or int")
        return {name: to_plain(entry, f"{key}.{name}", copied) for name, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_plain(entry, f"{key}[{index}]", copied) for index, entry in enumerate(value))
    # Exact types: reading a subclass, such as a string enum, would need its class.
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise CheckpointError(
        f"{key} of a checkpoint is a {type(value).__name__}. fix: save tensors, numbers, strings, lists and dicts only"
    )


def digest_of(state: Any) -> str:
    """Sha256 over the place, type and value of every entry of plain data."""
    sha = hashlib.sha256()

    def walk(value: Any, key: str) -> None:
        if isinstance(value, Tensor):
            sha.update(f"{key}:{value.dtype}{list(value.shape)}\n".encode())
            sha.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(value, dict):
            sha.update(f"{key}:dict {len(value)}\n".encode())
            for name, entry in value.items():
                walk(entry, f"{key}/{name!r}")
        elif isinstance(value, (list, tuple)):
            sha.update(f"{key}:{type(value).__name__} {len(value)}\n".encode())
            for index, entry in enumerate(value):
                walk(entry, f"{key}/{index}")
        else:
            sha.update(f"{key}:{value!r}\n".encode())

    walk(state, "")
    return sha.hexdigest()
