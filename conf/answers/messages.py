"""One sentence for what Hydra or OmegaConf found wrong."""

from __future__ import annotations

import os.path
import re
from collections.abc import Sequence
from typing import Any

from hydra.errors import OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from conf.answers.suggest import kinds_of, near_choice, near_value, option_of_file, suggest
from data.formats.recognise import KINDS


def explain(error: Exception, schema: Any) -> str:
    """One sentence for what Hydra or OmegaConf found wrong."""
    text = str(error)
    if isinstance(error, OverrideParseException):
        return (
            f"cannot read the option {error.override}. fix: write key=value, and quote a value that holds "
            "any of = , # { [ ~ or letters like ü, as in 'data.root=\"/my data/a=b\"'"
        )
    if override := re.search(r"Could not override '([^']+)'", text):
        given = re.search(rf"use \+{re.escape(override[1])}=(.*)", text)
        return f"no option {override[1]}; {suggest(override[1], given and given[1], schema)}"
    if choice := re.search(r"Could not find '((?:hydra/)?[^/]+)/(.+)'$", text, flags=re.MULTILINE):
        group, name = choice.groups()
        return _no_choice(group, name, re.findall(r"^\t(?!base$)(\S+)$", text, flags=re.MULTILINE), schema)
    if stray := re.match(r"Key '([^']+)' not in", text):
        key = str(getattr(error, "full_key", None) or stray[1])
        return f"no option {key}; {suggest(key, None, schema)}"
    details = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    full_key = getattr(details, "full_key", None)
    if not full_key:
        return " ".join(text.split())
    first_line = str(details).partition("\n")[0]
    if "missing mandatory value" in first_line.lower():
        return f"{full_key} has no value. fix: give {full_key}=... on the command line or in a YAML file"
    listed = re.search(r"Invalid value '(.*)', expected one of \[(.*)\]", first_line)
    near = near_value(full_key, listed[1], listed[2].split(", ")) if listed else None
    return f"{full_key}: {first_line}" + (f"; did you mean {full_key}={near}?" if near else "")


def _no_choice(group: str, name: str, choices: Sequence[str], schema: Any) -> str:
    """The sentence for a choice that a group lacks: it may be a file, or misspelt."""
    if meant := option_of_file(group, name, kinds_of(schema)):
        return f"{group}={name} is a file, and {group}= takes names. fix: {meant}"
    if group in ("data", "experiment") and is_path(name):
        kinds = KINDS if group == "data" else "a YAML file"
        return f"{group}={name}: there is no {os.path.expanduser(name)}. fix: one of the names, or the path of {kinds}"
    near = near_choice(name, choices)
    hint = f"did you mean {group}={near}? " if near else ""
    return f"no choice {group}={name}; {hint}there are: {', '.join(choices)}"


def is_path(word: str) -> bool:
    """Whether a choice reads like a path."""
    return "/" in word or bool(os.path.splitext(word)[1])
