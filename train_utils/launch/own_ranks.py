"""The option ``devices``: what it may be, and which processes it started. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AUTO = "auto"
OWN_RUN = "devices-"  # begins the run id of the ranks that it starts


def is_own_rank(environment: Mapping[str, str]) -> bool:
    """Whether ``devices=`` started this process."""
    return environment.get("TORCHELASTIC_RUN_ID", "").startswith(OWN_RUN)


def check_devices(devices: Any) -> None:
    """Raise ValueError unless ``devices`` is null, auto or a number."""
    if devices not in (None, AUTO) and not (type(devices) is int and devices >= 1):
        raise ValueError(
            f"devices must be a number of processes, or {AUTO} for one on each GPU, got {devices}; which GPUs, the "
            "environment variable CUDA_VISIBLE_DEVICES chooses"
        )
