"""The search space of scripts/tune.py: how it is written, and which options it gives."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from train_utils.shell import option

Value = float | int | str | bool | None
FORMS = "uniform:LOW:HIGH, log:LOW:HIGH, int:LOW:HIGH, int:LOW:HIGH:STEP or [A,B,...]"


@dataclass(frozen=True)
class Dimension:
    """The values of one option: ``choices``, or those from ``low`` to ``high``, both included."""

    kind: str  # uniform, log, int or choice
    low: float = 0
    high: float = 0
    step: int = 1  # between two values of kind int
    choices: tuple[Value, ...] = ()

    @property
    def ends(self) -> tuple[Value, ...]:
        """All choices, or the lowest and the highest value."""
        return self.choices or (self.low, self.high)


def parse_space(space: Mapping[str, Any], prefix: str = "") -> dict[str, Dimension]:
    """The dimension of each option of train.py; ``space`` may nest as YAML does.

    Raises ValueError, naming the key, for what has none of FORMS.
    """
    found: dict[str, Dimension] = {}
    for key, given in space.items():
        if isinstance(given, Mapping):
            found |= parse_space(given, f"{prefix}{key}.")
        else:
            dimension = _parse(given)
            if dimension is None:
                raise ValueError(f"space.{prefix}{key}={given} is no range or list. fix: {FORMS}")
            found[f"{prefix}{key}"] = dimension
    return found


def gather_options(given: Sequence[str]) -> list[str]:
    """Command-line arguments with what follows ``--`` as the list ``options``.

    Keys of ``space`` are marked as new ones, which Hydra takes only so.
    """
    words = [f"++{word}" if word.startswith("space.") else word for word in given]
    if "--" not in given:
        return words
    at = given.index("--")
    listed = (shlex.split(option("", word))[0].removeprefix("=") for word in given[at + 1 :])
    quoted = (word if word.startswith('"') else f'"{word}"' for word in listed)
    return [*words[:at], f"options=[{','.join(quoted)}]"]


def arguments(values: Mapping[str, Value]) -> list[str]:
    """The values of one trial as arguments of train.py, not quoted for a shell."""
    words = {None: "null", True: "true", False: "false"}
    shown = {key: words[value] if value is None or isinstance(value, bool) else value for key, value in values.items()}
    return [shlex.split(option(key, value))[0] for key, value in shown.items()]


def _parse(given: Any) -> Dimension | None:
    if isinstance(given, Sequence) and not isinstance(given, str):
        plain = all(value is None or isinstance(value, float | int | str | bool) for value in given)
        return Dimension("choice", choices=tuple(given)) if given and plain else None
    kind, *numbers = str(given).split(":")
    with suppress(ValueError):  # not a number
        low, high, *step = map(int if kind == "int" else float, numbers)
        sizes = {"uniform": 0, "log": 0, "int": 1}
        if len(step) <= sizes.get(kind, -1) and low < high and (kind != "log" or low > 0) and min(step, default=1) > 0:
            return Dimension(kind, low, high, int(step[0]) if step else 1)
    return None
