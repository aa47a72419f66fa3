"""Options that can be pasted into a shell."""

from __future__ import annotations

import re
import shlex

PLAIN = re.compile(r"[\w./+@%:*?-][\w./+@%:*? -]*(?<! )", re.ASCII)  # Hydra reads it as text without quotes


def option(key: str, value: object) -> str:
    """``key=value``, quoted for Hydra and a POSIX shell where needed, e.g. a path with spaces."""
    text = str(value)
    if not PLAIN.fullmatch(text):
        text = '"' + re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + ('\\"' if found[2] else ""), text) + '"'
    return shlex.quote(f"{key}={text}")
