"""What a plugin registers, by the decorators that it imports from ``plugins``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    more: dict[str, Any] = field(default_factory=dict)  # optimiser: values of optim.*; callback: every_rank


@dataclass(frozen=True)
class Plugin:
    """A loaded plugin: the name and the file by which it is known, and what it registers."""

    name: str
    given: str  # the absolute path of a file, or the name of an entry point
    sha256: str
    parts: tuple[Part, ...]


IN_USE: list[Plugin] = []  # by the options that were read last
_collected: list[Part] = []  # by the decorators, while a plugin is imported


@contextmanager
def collecting() -> Iterator[list[Part]]:
    """The parts that are registered within the body."""
    _collected.clear()
    yield _collected


def registering(kind: str, name: str, options: type | None, **more: Any) -> Callable[[Made], Made]:
    """The decorator of a kind. Raises ValueError for an odd name, or options of no dataclass."""
    if not re.fullmatch(r"[a-z]\w*", name, flags=re.ASCII):
        raise ValueError(f"the name of the {kind} {name!r} must be lower-case letters, digits and _")
    if options is not None and not (is_dataclass(options) and all(one.init for one in fields(options))):
        raise ValueError(f"the options of the {kind} {name} must be a dataclass")

    def register(make: Made) -> Made:
        _collected.append(Part(kind, name, make, options, more))
        return make

    return register
