"""What the option ``devices`` may be."""

from __future__ import annotations

from typing import Any

import pytest

from train_utils.launch.own_ranks import check_devices


@pytest.mark.parametrize("devices", [None, 1, 4, "auto", [0], [0, 2], ["GPU-8a", "MIG-1b"], [1, "GPU-8a"]])
def test_numbers_auto_and_lists_of_gpus_are_devices(devices: Any) -> None:
    check_devices(devices)


@pytest.mark.parametrize("devices", [0, -1, 1.5, True, "all", "2", [], [0, 0], [0, "0"], [-1], ["0,1"], [""]])
def test_anything_else_is_refused(devices: Any) -> None:
    with pytest.raises(ValueError, match=r"devices must be a number of processes, auto .*, got "):
        check_devices(devices)
