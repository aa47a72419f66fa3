"""A check, before the first step, that all ranks were started alike."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from train_utils.distributed import World, gather_arrays
from train_utils.errors import TrainError
from train_utils.run.run_folder import on_main
from train_utils.run.same_training import flat

SHOWN = 60  # characters of a value


def require_agreement(world: World, facts: Mapping[str, Any]) -> None:
    """Raise TrainError on every rank if the ``facts``, nested plain data, differ between ranks."""
    gathered = gather_arrays(np.frombuffer(json.dumps(facts).encode(), np.uint8))

    def compare() -> None:
        found = difference([json.loads(text.tobytes()) for text in gathered or ()])
        if found is not None:
            raise TrainError(f"{found}. fix: start all ranks with the same options, data and program")

    on_main(world, compare)


def difference(facts: Sequence[Mapping[str, Any]]) -> str | None:
    """The first full key that differs, with the values of rank 0 and the first other rank."""
    tables = [flat(of_rank) for of_rank in facts]
    for rank, table in enumerate(tables):
        for key in dict.fromkeys((*tables[0], *table)):
            if tables[0].get(key) != table.get(key):
                values = f"{_short(tables[0].get(key))} on rank 0 and {_short(table.get(key))} on rank {rank}"
                return f"{key} is {values}"
    return None


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
