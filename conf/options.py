"""Options of runs side by side, which of them a resume may change, and how a shell reads them."""

import re
import shlex
from collections.abc import Mapping
from typing import Any

# Options, or whole sections, of the machine: a job may be requeued with others, and finds its run.
OF_THE_MACHINE = (
    "debug", "devices", "data.root", "data.index_dir", "data.workers", "data.cache", "logger", "train.device",
    "train.timeout_seconds",
)  # fmt: skip
# What a resumed run may have otherwise than its checkpoint says.
MAY_CHANGE = (
    *OF_THE_MACHINE, "run_dir", "resume", "plugins", "train.epochs", "data.train", "data.val", "evaluate.batch_size",
    "evaluate.every", "evaluate.scorer", "train.save_every_steps", "train.save_every_minutes",
    "train.max_nonfinite_steps", "train.patience",
)  # fmt: skip
OF_THE_RESUME = ("run_dir", "resume")  # never listed as changed: every resume changes them


def changed_values(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Differences of two configurations by full key, as ``old -> new``, except OF_THE_RESUME."""
    old, new = flat(before), flat(now)
    return {
        key: f"{old.get(key)} -> {new.get(key)}"
        for key in dict.fromkeys((*old, *new))
        if key not in OF_THE_RESUME and old.get(key) != new.get(key)
    }


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries, joining keys with dots."""
    table: dict[str, Any] = {}
    for key, value in nested.items():
        table |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return table


def is_covered(key: str, options: tuple[str, ...]) -> bool:
    """Whether ``options`` name ``key`` or a section that contains it."""
    return f"{key}.".startswith(tuple(f"{option}." for option in options))


PLAIN = re.compile(r"[\w./+@%:*?-][\w./+@%:*? -]*(?<! )", re.ASCII)  # Hydra reads it as text without quotes


def option(key: str, value: object) -> str:
    """``key=value``, quoted for Hydra and a POSIX shell where needed, e.g. a path with spaces."""
    text = str(value)
    return shlex.quote(f"{key}={text if PLAIN.fullmatch(text) else quoted(text)}")


def quoted(text: str) -> str:
    """A text that Hydra reads as such, also ``null`` and ``1``."""
    return '"' + re.sub(r'(\\*)("|$)', lambda match: match[1] * 2 + ('\\"' if match[2] else ""), text) + '"'
