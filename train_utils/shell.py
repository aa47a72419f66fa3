"""Options as a user can paste them into a shell."""

from __future__ import annotations

import re
import shlex

PLAIN = re.compile(r"[\w./+@%:*?-][\w./+@%:*? -]*(?<! )", re.ASCII)  # what Hydra reads as text without quotes


def option(key: str, value: object) -> str:
    """``key=value``, quoted for Hydra and for a POSIX shell where the value needs it, as a path with blanks does."""
    text = str(value)
    if not PLAIN.fullmatch(text):
        text = '"' + re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + ('\\"' if found[2] else ""), text) + '"'
    return shlex.quote(f"{key}={text}")
