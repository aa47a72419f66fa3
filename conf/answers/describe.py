"""The meaning of each option, read from the comments beside the fields of the dataclasses."""

from __future__ import annotations

import inspect
import io
import tokenize
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from conf.schema import CHOICES, PluggedConfig


@dataclass(frozen=True)
class Option:
    """One key as typed on the command line."""

    key: str
    kind: str  # its type in words, or its possible values
    meaning: str  # a sentence or two; empty if the name is enough


def options_of(schema: type, prefix: str = "") -> list[Option]:
    """The options of a dataclass in order, without those of its sections.

    Those that the programs share come last.
    """
    kinds, meanings = get_type_hints(schema), comments_of(schema)
    shared = {field.name for field in fields(PluggedConfig)}
    return [
        Option(prefix + field.name, kind_in_words(kinds[field.name]), meanings.get(field.name, ""))
        for field in sorted(fields(schema), key=lambda field: field.name in shared)
        if not sections_in(kinds[field.name]) and field.name not in CHOICES
    ]


def sections_in(kind: Any) -> list[type]:
    """The option dataclasses that a type hint names."""
    return [part for part in (kind, *get_args(kind)) if is_dataclass(part) and isinstance(part, type)]


def comments_of(schema: type) -> dict[str, str]:
    """The comment beside each field, with the comment lines that continue it."""
    found: dict[str, str] = {}
    for part in reversed(schema.__mro__[:-1]):
        field, last_line = "", 0
        for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(part)).readline):
            if token.type == tokenize.NAME and token.start[1] == 4 and token.string in part.__annotations__:
                field, last_line = token.string, token.start[0]
            elif token.type == tokenize.COMMENT and field and token.start[0] - last_line <= 1:
                last_line = token.start[0]
                found[field] = f"{found.get(field, '')} {token.string.lstrip('# ')}".strip()
    return found


def kind_in_words(kind: Any) -> str:
    """A type hint in words: ``number or null``, ``auto, cpu, cuda``."""
    if kind is Any:
        return "any"
    if get_origin(kind) is UnionType or type(None) in get_args(kind):
        return " or ".join("null" if part is type(None) else kind_in_words(part) for part in get_args(kind))
    if get_origin(kind) is list:
        return f"list of {kind_in_words(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return "mapping"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(member.name for member in kind)
    words = {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}
    name: str = kind.__name__
    return words.get(name, name)


def shown(value: Any) -> str:
    """A value as a user types it; ``-`` for a missing one."""
    words = {None: "null", True: "true", False: "false", "???": "-"}
    return words[value] if isinstance(value, str | bool | None) and value in words else str(value)
