"""Which option, choice or value was meant: by what others call it, or by letters."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Any, get_args, get_origin, get_type_hints

from conf import GROUPS_DIR
from conf.answers.names import FILES, KEYS, VALUES
from conf.schema import CHOICES
from train_utils.shell import option


def kinds_of(schema: Any, prefix: str = "") -> dict[str, Any]:
    """The type of every key as typed on a command line, with the keys of all choices."""
    kinds: dict[str, Any] = {}
    for name, kind in get_type_hints(schema).items():
        kinds.setdefault(prefix + name, kind)
        for part in CHOICES.get(prefix + name, {}).values() or (kind, *get_args(kind)):
            if is_dataclass(part):
                kinds = kinds_of(part, f"{prefix}{name}.") | kinds
    return kinds


def meant(name: str, value: str | None, kinds: Mapping[str, Any]) -> list[str]:
    """The keys that ``name`` may mean, the likeliest first; ``key=value`` for a fixed value.

    Their last word, or the name of another program for them, is that of ``name`` or is spelt much
    like it. Those in the section of ``name`` are preferred, then those in the fewest sections.
    """
    if name in kinds:
        return [name]
    section, _, word = name.lower().replace("-", "_").rpartition(".")
    called: dict[str, list[str]] = {}
    for key in sorted(kinds, key=lambda key: key.count(".")):
        called.setdefault(key.rpartition(".")[2], []).append(key)
    wanted = value is None or value.lower() in ("true", "1")  # what a fixed value says
    for other, keys in KEYS.items():
        here = [key for key in keys if key in kinds or (wanted and key.partition("=")[0] in kinds)]
        if here or other == word:
            called[other] = here
    for near in get_close_matches(word, called, n=1, cutoff=0.75):
        inside = [key for key in called[near] if key.rpartition(".")[0] == section and section]
        outermost = [key for key in called[near] if key.count(".") == called[near][0].count(".")]
        return inside or (called[near][:1] if near in KEYS else outermost)
    return []


def written(key: str, value: str | None, kinds: Mapping[str, Any]) -> str:
    """``key=value`` for shell and Hydra, with our word for the value.

    A file goes to the key that takes such files. Without a value it is ``true``, or left open.
    """
    if "=" in key:
        return key
    if value is None:
        is_switch = bool in (kinds[key], *get_args(kinds[key])) or _translated(key, "true") != "true"
        value = "true" if is_switch else "..."
    if get_origin(kinds[key]) is list:
        return shlex.quote(f"{key}=[{value}]")
    return option_of_file(key, value, kinds) or option(key, os.path.expanduser(_translated(key, value)))


def option_of_file(key: str, value: str, kinds: Mapping[str, Any]) -> str | None:
    """The options that take the file of ``key=value`` by its suffix; None if ``key`` is right."""
    suffix = os.path.splitext(value)[1].lower()
    fitting = [known for known in FILES.get(suffix, ()) if known in kinds]
    if not fitting or key not in ("model", "ckpt"):
        return None
    given = option(fitting[0], os.path.expanduser(value))
    if suffix == ".weights" and "ckpt" in kinds:  # no network is chosen there otherwise
        return darknet_options(value, fitting[0])
    return given


def darknet_options(path: str, key: str = "model.weights") -> str:
    """Both files of a Darknet network by the name of one; the .cfg by its name in the zoo."""
    stem = os.path.splitext(os.path.expanduser(path))[0]
    zoo = os.path.basename(stem)
    in_zoo = (GROUPS_DIR / "model" / f"{zoo}.yaml").exists()
    return f"{option('model.cfg', zoo if in_zoo else f'{stem}.cfg')} {option(key, f'{stem}.weights')}"


def suggest(key: str, value: str | None, schema: Any) -> str:
    """A sentence with the keys that may be meant, or with the way to list all."""
    kinds = kinds_of(schema)
    near = " or ".join(
        (known if value is None else written(known, value, kinds)) + _where(known) for known in meant(key, value, kinds)
    )
    return f"did you mean {near}?" if near else "--help lists all options."


def _where(key: str) -> str:
    """The choices of the key's section that have it, unless all do."""
    section, _, name = key.rpartition(".")
    choices = CHOICES.get(section, {})
    having = [f"{section}={choice}" for choice, kind in choices.items() if name in get_type_hints(kind)]
    return "" if len(having) == len(choices) else f" (of {' or '.join(having)})"


def near_choice(name: str, choices: Sequence[str]) -> str | None:
    """The choice of a group that ``name`` may mean; another number is another network or set."""
    spelt = os.path.splitext(name)[0].lower().replace("_", "-")
    digits = set(re.findall(r"\d", spelt))
    alike = [choice for choice in choices if not digits or set(re.findall(r"\d", choice)) <= digits]
    near = get_close_matches(spelt, alike, n=1)
    return near[0] if near else None


def near_value(key: str, value: str, choices: Sequence[str]) -> str | None:
    """The one of ``choices`` that ``value`` may mean, by our word for it or by letters."""
    near = get_close_matches(_translated(key, value), choices, n=1)
    return near[0] if near else None


def _translated(key: str, value: str) -> str:
    """Our word for a value of other programs; ``value`` if it is none."""
    words = VALUES.get(key.rpartition(".")[2], {})
    return next((ours for theirs, ours in words.items() if re.fullmatch(theirs, value.lower())), value)
