"""Options that can be pasted into a shell."""

from __future__ import annotations

import re
import shlex

PLAIN = re.compile(r"[\w./+@%:*?-][\w./+@%:*? -]*(?<! )", re.ASCII)  # Hydra reads it as text without quotes


def option(key: str, value: object) -> str:
    """``key=value``, quoted for Hydra and a POSIX shell where needed, e.g. a path with spaces."""
    text = str(value)
    return shlex.quote(f"{key}={text if PLAIN.fullmatch(text) else quoted(text)}")


def quoted(text: str) -> str:
    """A text that Hydra reads as such, also ``null`` and ``1``."""
    return '"' + re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + ('\\"' if found[2] else ""), text) + '"'
