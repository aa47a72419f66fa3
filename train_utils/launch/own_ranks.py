"""The option ``devices``: what it may be, and which processes it started. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from train_utils.errors import DistributedError

AUTO = "auto"
OWN_RUN = "devices-"  # begins the run id of the ranks that it starts


def is_own_rank(environment: Mapping[str, str]) -> bool:
    """Whether ``devices=`` started this process."""
    return environment.get("TORCHELASTIC_RUN_ID", "").startswith(OWN_RUN)


def check_devices(devices: Any) -> None:
    """Raise ValueError unless ``devices`` is null, auto, a number or a list of different GPUs."""
    if isinstance(devices, list):
        names = [str(each) for each in devices]
        right = 0 < len(set(names)) == len(names) and all(name and name[0] != "-" and "," not in name for name in names)
    else:
        right = devices in (None, AUTO) or (type(devices) is int and devices >= 1)
    if not right:
        raise ValueError(
            f"devices must be a number of processes, {AUTO} for one on each GPU, or a list of GPUs such as [0,2], "
            f"got {devices}"
        )


def visible_devices(chosen: Sequence[str], environment: Mapping[str, str]) -> str:
    """CUDA_VISIBLE_DEVICES for GPUs by torch's number among those of ``environment``, or by id.

    Raises DistributedError for a number that none of them has.
    """
    seen = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if lost := [each for each in chosen if each.isdecimal() and seen and int(each) >= len(seen)]:
        raise DistributedError(
            f"there is no GPU {lost[0]} among CUDA_VISIBLE_DEVICES={','.join(seen)}. fix: devices=auto for all of them"
        )
    return ",".join(seen[int(each)] if seen and each.isdecimal() else each for each in chosen)
