"""Collect what a plugin registers with the decorators of ``plugins``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

Made = TypeVar("Made", bound=Callable[..., Any])


@dataclass(frozen=True)
class Part:
    """Something that a plugin registers."""

    kind: str
    name: str
    make: Callable[..., Any]
    options: type | None = None
    more: dict[str, Any] = field(default_factory=dict)  # optimiser: values of optim.*


@dataclass(frozen=True)
class Plugin:
    """A loaded plugin: its name, its file or entry point, and what it registers."""

    name: str
    given: str  # the absolute path of a file, or the name of an entry point
    sha256: str
    parts: tuple[Part, ...]


IN_USE: list[Plugin] = []  # those that the options read last name
COLLECTED: list[Part] = []  # filled by the decorators while a plugin is imported


def registering(kind: str, name: str, options: type | None, **more: Any) -> Callable[[Made], Made]:
    """The decorator of a kind. Raises ValueError for a bad name or options of no dataclass."""
    if not re.fullmatch(r"[a-z]\w*", name, flags=re.ASCII):
        raise ValueError(f"the name of the {kind} {name!r} must be lower-case letters, digits and _")
    if options is not None and not (is_dataclass(options) and all(one.init for one in fields(options))):
        raise ValueError(f"the options of the {kind} {name} must be a dataclass")

    def register(make: Made) -> Made:
        COLLECTED.append(Part(kind, name, make, options, more))
        return make

    return register
