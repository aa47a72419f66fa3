"""What the option ``devices`` may be."""

from __future__ import annotations

from typing import Any

import pytest

from train_utils.launch.own_ranks import check_devices


@pytest.mark.parametrize("devices", [None, 1, 4, "auto"])
def test_numbers_and_auto_are_devices(devices: Any) -> None:
    check_devices(devices)


@pytest.mark.parametrize("devices", [0, -1, 1.5, True, "all", "2", [], [0, 2]])
def test_anything_else_is_refused(devices: Any) -> None:
    with pytest.raises(ValueError, match=r"devices must be a number of processes, or auto .*, got .* chooses"):
        check_devices(devices)
