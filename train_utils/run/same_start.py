"""Whether all processes were started alike, found out before the first step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from train_utils.distributed import World, gather_arrays
from train_utils.errors import TrainError
from train_utils.run.run_folder import on_main

SHOWN = 60  # characters of a value


def require_agreement(world: World, facts: Mapping[str, Any]) -> None:
    """Raise TrainError on all processes where one of the ``facts``, nested plain data, is not the same on all."""
    gathered = gather_arrays(np.frombuffer(json.dumps(facts).encode(), np.uint8))

    def compare() -> str:
        found = difference([json.loads(text.tobytes()) for text in gathered or ()])
        if found is not None:
            raise TrainError(f"{found}. fix: start all processes with the same options, data and program")
        return ""

    on_main(world, compare)


def difference(facts: Sequence[Mapping[str, Any]]) -> str | None:
    """The first full key whose values differ, with that of rank 0 and that of the first rank that has another."""
    tables = [flat(of_rank) for of_rank in facts]
    for rank, table in enumerate(tables):
        for key in dict.fromkeys((*tables[0], *table)):
            if tables[0].get(key) != table.get(key):
                values = f"{_short(tables[0].get(key))} on rank 0 and {_short(table.get(key))} on rank {rank}"
                return f"{key} is {values}"
    return None


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with keys joined by dots."""
    table: dict[str, Any] = {}
    for key, value in nested.items():
        table |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return table


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
