"""Which option was meant: by what other programs call it, by letters, by its meaning."""

from __future__ import annotations

import difflib
import os.path
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from conf.answers.names import KEYS, VALUES
from conf.describe import meanings_of
from conf.schema import CHOICES
from train_utils.shell import option

CONF_DIR = Path(__file__).parents[1]
GROUPS = frozenset(path.name for path in CONF_DIR.iterdir() if any(path.glob("*.yaml")))
# Groups take names of choices. These keys take files, by their suffixes; the first that there is.
KEYS_OF_FILES = {
    "model": {
        ".cfg": "model.cfg", ".weights": "weights model.weights", ".pt": "ckpt model.weights", ".pth": "model.weights",
    },
    "data": dict.fromkeys((".yaml", ".yml", ".data"), "data.root"),  # of a YOLO set
    "source": dict.fromkeys((".jpg", ".jpeg", ".png", ".bmp", ".mp4", ".avi", ".mov", ".mkv"), "source"),
}  # fmt: skip


def kinds_of(schema: Any, prefix: str = "") -> dict[str, Any]:
    """The type of every key as typed on a command line, with the keys of all choices."""
    kinds: dict[str, Any] = {}
    for name, kind in get_type_hints(schema).items():
        kinds.setdefault(prefix + name, kind)
        for part in CHOICES.get(prefix + name, {}).values() or (kind, *get_args(kind)):
            if is_dataclass(part):
                for key, inner in kinds_of(part, f"{prefix}{name}.").items():
                    kinds.setdefault(key, inner)
    return kinds


def plain_name(name: str) -> str:
    """The last word of a key or flag as the table spells it: in lower case, with ``_``."""
    return name.rpartition(".")[2].lstrip("-").lower().replace("-", "_")


def called_here(name: str, value: str | None, kinds: Mapping[str, Any]) -> str | None:
    """``key=value`` for what another program calls ``name``; None if this program has no such key.

    Among several keys one in the section of ``name`` comes first, then one that takes ``value``.
    """
    keys = [key for key in KEYS.get(plain_name(name), ()) if key.partition("=")[0] in kinds]
    if value is not None and value.lower() == "false":  # what is not wanted is no fixed value
        keys = [key for key in keys if "=" not in key]
    section = name.rpartition(".")[0] + "."
    keys.sort(key=lambda key: (not key.startswith(section), not _takes(kinds.get(key), value)))
    return written(keys[0], value, kinds) if keys else None


def written(key: str, value: str | None, kinds: Mapping[str, Any]) -> str:
    """``key=value`` for shell and Hydra, with our word for the value.

    A file goes to the key that takes such files. Without a value it is ``true``, or left open.
    """
    if "=" in key:
        return key
    if value is None:
        open_value = "true" if _takes(kinds.get(key), "true", exactly=True) else "..."
        return f"{key}={_translated(key, 'true') if _translated(key, 'true') != 'true' else open_value}"
    if key in GROUPS or key == "ckpt":
        return option_of_file(value, kinds, {"ckpt": "model"}.get(key, key)) or option(key, value)
    value = os.path.expanduser(_translated(key, value))
    return shlex.quote(f"{key}={value}") if value.startswith("[") else option(key, value)


def option_of_file(value: str, kinds: Mapping[str, Any], group: str = "") -> str | None:
    """The option that takes the file ``value``, by its suffix; with ``group`` one of that group."""
    suffix = os.path.splitext(re.sub(r"\.conv\.\d+$", ".weights", value))[1].lower()
    for name, keys in KEYS_OF_FILES.items():
        there = [key for key in keys.get(suffix, "").split() if key in kinds]
        if group not in ("", name) or not there:
            continue
        given = option(there[0], os.path.expanduser(value))
        if name == "data":
            return f"data=yolo {given}"
        if suffix == ".weights" and "ckpt" in kinds:  # there no network is chosen otherwise
            stem = os.path.splitext(value)[0]
            in_zoo = (CONF_DIR / "model" / f"{os.path.basename(stem)}.yaml").exists()
            return f"{option('model.cfg', os.path.basename(stem) if in_zoo else f'{stem}.cfg')} {given}"
        return given
    return None


def suggest(key: str, value: str | None, schema: Any) -> str:
    """A sentence with the keys that may be meant, or with the way to list all."""
    kinds = kinds_of(schema)
    if key not in kinds and (meant := called_here(key, value, kinds)):
        return f"did you mean {meant}?"
    near = nearest(key, kinds)
    alias = difflib.get_close_matches(plain_name(key), KEYS, n=1, cutoff=0.8)
    if alias and ("." not in key or not near) and (meant := called_here(alias[0], value, kinds)):
        return f"did you mean {meant}?"
    near = near or _about(key, schema)
    said = [_with_choice(known, known if value is None else written(known, value, kinds)) for known in near]
    return f"did you mean {' or '.join(said)}?" if near else "--help lists all options."


def nearest(key: str, kinds: Mapping[str, Any]) -> list[str]:
    """Keys that ``key`` may mean: with the same last word, else with similar letters."""
    section, _, word = key.rpartition(".")
    same = [known for known in kinds if known.rpartition(".")[2] == word]
    if same:
        return [known for known in same if known.rpartition(".")[0] == section] or same
    sections = list(dict.fromkeys(known.rpartition(".")[0] for known in kinds))
    near = [section] if section in sections else difflib.get_close_matches(section, sections, n=1, cutoff=0.7)
    for among in (near, sections):  # a letter or two are wrong in the right section, or the section is missing
        words = {known.rpartition(".")[2]: known for known in kinds if known.rpartition(".")[0] in among}
        if found := difflib.get_close_matches(word, words, n=1, cutoff=0.7 if among is near else 0.8):
            return [words[found[0]]]
    return []


def _about(key: str, schema: Any) -> list[str]:
    """At most three keys whose names and meanings speak of all words of ``key``."""
    parts = [part.rstrip("s")[:6] for part in re.findall(r"[a-z]{4,}", key.rpartition(".")[2].lower())]
    found = [known for known, meaning in meanings_of(schema).items() if _speaks_of(parts, f"{known} {meaning}")]
    return found if len(found) <= 3 else []


def _speaks_of(parts: Sequence[str], text: str) -> bool:
    return bool(parts) and all(re.search(rf"(?:\b|_){part}", text.lower()) for part in parts)


def _with_choice(key: str, said: str) -> str:
    """``said`` with the choices of the key's section that have it, unless all do."""
    section, _, name = key.rpartition(".")
    choices = CHOICES.get(section, {})
    having = [f"{section}={choice}" for choice, kind in choices.items() if name in get_type_hints(kind)]
    return said if len(having) == len(choices) else f"{said} (of {' or '.join(having)})"


def near_choice(name: str, choices: Sequence[str]) -> str | None:
    """The choice of a group that ``name`` may mean; another number is another network or set."""
    spelt = os.path.splitext(name)[0].lower().replace("_", "-")
    if spelt in choices:
        return spelt
    digits = re.findall(r"\d", spelt)
    alike = [choice for choice in choices if not digits or set(re.findall(r"\d", choice)) <= set(digits)]
    return next(iter(difflib.get_close_matches(spelt, alike, n=1) or [one for one in alike if spelt in one]), None)


def near_value(key: str, value: str, choices: Sequence[str]) -> str | None:
    """The one of ``choices`` that ``value`` may mean, by our word for it or by letters."""
    meant = _translated(key, value)
    return meant if meant in choices else next(iter(difflib.get_close_matches(value, choices, n=1)), None)


def _translated(key: str, value: str) -> str:
    words = VALUES.get(key.rpartition(".")[2], {})
    pattern = re.sub(r"\d+(?:,\d+)*", "*", value)
    return words.get(value.lower(), words.get(pattern if value not in words else value, value))


def _takes(kind: Any, value: str | None, exactly: bool = False) -> bool:
    """Whether a type takes a value as typed; ``exactly``: as it is, not as text."""
    parts = list(get_args(kind)) if get_args(kind) and get_origin(kind) is not list else [kind]
    if value is None:
        return True
    number = re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", value, re.IGNORECASE) is not None
    for part in parts:
        if part is bool and value.lower() in ("true", "false"):
            return True
        if (part is float and number) or (part is int and re.fullmatch(r"[-+]?\d+", value)):
            return True
        if isinstance(part, type) and issubclass(part, Enum) and value in [str(one.value) for one in part]:
            return True
        if not exactly and (part in (str, Any) or get_origin(part) is list):
            return True
    return False
