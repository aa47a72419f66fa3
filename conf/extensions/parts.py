"""What a plugin registers, by the decorators that it imports from ``plugins``.

Each decorator takes a name and, optionally, a dataclass whose fields are the part's options, with
their defaults. The decorated function or class then gets an instance as the keyword ``options``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Protocol, TypeVar, get_type_hints

Made = TypeVar("Made", bound=Callable[..., Any])
SECTION_TYPES = (int, float, str, bool)  # of the options of a layer


class Decorator(Protocol):
    """Registers a function or a class, and returns it unchanged."""

    def __call__(self, make: Made, /) -> Made:
        """Register it."""
        ...


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


def layer(name: str, options: type | None = None) -> Decorator:
    """A section ``[name]`` of a .cfg: ``build(graph, section)`` returns its Node.

    As the builders in models/network/sections.py. The fields of ``options`` are the section's keys.
    """
    kinds = get_type_hints(options).values() if options is not None else ()
    if any(kind not in SECTION_TYPES for kind in kinds):
        raise ValueError(f"the options of the layer {name} must be of the types int, float, str and bool")
    return _registering("layer", name, options)


def activation(name: str, options: type | None = None) -> Decorator:
    """A value of ``activation=`` in a .cfg: ``make()`` returns a module."""
    return _registering("activation", name, options)


def data_format(name: str, options: type | None = None) -> Decorator:
    """A value of ``data.format``: ``read(annotations, images)`` returns a COCO dictionary.

    ``annotations``, a file or a folder, and ``images``, a folder, are paths. The dictionary holds
    ``images``, ``annotations`` and ``categories`` as in an instances json.
    """
    return _registering("data_format", name, options)


def loss(name: str, options: type | None = None) -> Decorator:
    """A value of ``loss=``: ``make(heads)`` returns a models.loss.base.HeadLoss, or its like."""
    return _registering("loss", name, options)


def assigner(name: str, options: type | None = None) -> Decorator:
    """Which cells and anchors learn an object, in ``loss=yolov3``: models.loss.yolo.Assigner."""
    return _registering("assigner", name, options)


def optimiser(name: str, options: type | None = None, **values: Any) -> Decorator:
    """A value of ``optim=``: ``make(groups, lr)`` returns a torch optimiser.

    ``values`` are those of ``optim.*`` that differ from ``optim=sgd``. Groups are as in
    train_utils/optim.py. Rates, weight decay and momentum or betas are set before each step.
    """
    return _registering("optimiser", name, options, **values)


def augmentation(name: str, options: type | None = None) -> Decorator:
    """A change of each training sample: ``change(sample, generator)`` returns the new Sample.

    See data.batches.changed.Sample. All that is random must come from ``generator``.
    """
    return _registering("augmentation", name, options)


def logger(name: str, options: type | None = None) -> Decorator:
    """A logger on rank 0: ``make(run)`` returns one, see train_utils/loggers/interface.py."""
    return _registering("logger", name, options)


def callback(name: str, options: type | None = None, every_rank: bool = False) -> Decorator:
    """An object, from ``make()``, whose methods are called at the moments that they name.

    Each takes a train_utils.callbacks.callbacks.Moment. They run on rank 0 only, or with
    ``every_rank`` on all.
    """
    return _registering("callback", name, options, every_rank=every_rank)


def _registering(kind: str, name: str, options: type | None, **more: Any) -> Decorator:
    if not re.fullmatch(r"[a-z]\w*", name, flags=re.ASCII):
        raise ValueError(f"the name of the {kind} {name!r} must be lower-case letters, digits and _")
    if options is not None and not (is_dataclass(options) and all(one.init for one in fields(options))):
        raise ValueError(f"the options of the {kind} {name} must be a dataclass")

    def register(make: Made) -> Made:
        _collected.append(Part(kind, name, make, options, more))
        return make

    return register
