"""Values that make no sense are refused with the full key."""

from dataclasses import replace
from typing import Any

import pytest

from data import DataFormat


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": -1}, r"data.workers must be >= 0 and <= 1024, or auto, got -1"),
        ({"format": DataFormat.shapes}, r"data.format=shapes needs data.shapes"),
        ({"format": DataFormat.voc}, r"data.format=voc needs data.names"),
        ({"names": []}, r"data.names must be a list"),
        ({"names": ["a", "b", "a"]}, r"data.names lists 'a' twice"),
    ],
)
def test_data(changes: dict[str, Any], message: str, coco_set) -> None:
    with pytest.raises(ValueError, match=message):
        replace(coco_set.config, **changes)
