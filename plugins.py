"""What a plugin imports to register its parts: one decorator for each kind.

docs/develop/extending.md lists the kinds.

from plugins import augmentation

@augmentation("grey")
def grey(sample, generator): ...

Each decorator takes a name and, optionally, a dataclass whose fields are the part's options, with
their defaults. The decorated function or class then gets an instance as the keyword ``options``.
"""

from collections.abc import Callable
from typing import Any, get_type_hints

from conf.extensions.parts import Made, registering

SECTION_TYPES = (int, float, str, bool)  # of the options of a layer


def layer(name: str, options: type | None = None) -> Callable[[Made], Made]:
    """A section ``[name]`` of a .cfg: ``build(graph, section)`` returns its Node.

    As the builders in models/network/sections.py. The fields of ``options`` are the section's keys.
    """
    kinds = get_type_hints(options).values() if options is not None else ()
    if any(kind not in SECTION_TYPES for kind in kinds):
        raise ValueError(f"the options of the layer {name} must be of the types int, float, str and bool")
    return registering("layer", name, options)


def activation(name: str, options: type | None = None) -> Callable[[Made], Made]:
    """A value of ``activation=`` in a .cfg: ``make()`` returns a module."""
    return registering("activation", name, options)


def data_format(name: str, options: type | None = None) -> Callable[[Made], Made]:
    """A value of ``data.format``: ``read(annotations, images)`` returns a COCO dictionary.

    ``annotations``, a file or a folder, and ``images``, a folder, are paths. The dictionary holds
    ``images``, ``annotations`` and ``categories`` as in an instances json.
    """
    return registering("data_format", name, options)


def loss(name: str, options: type | None = None) -> Callable[[Made], Made]:
    """A value of ``loss=``: ``make(heads)`` returns a models.loss.base.HeadLoss, or its like."""
    return registering("loss", name, options)


def assigner(name: str, options: type | None = None) -> Callable[[Made], Made]:
    """Which cells and anchors learn an object, in ``loss=yolov3``: models.loss.yolo.Assigner."""
    return registering("assigner", name, options)


def optimiser(name: str, options: type | None = None, **values: Any) -> Callable[[Made], Made]:
    """A value of ``optim=``: ``make(groups, lr)`` returns a torch optimiser.

    ``values`` are those of ``optim.*`` that differ from ``optim=sgd``. Groups are as in
    train_utils/optim.py. Rates, weight decay and momentum or betas are set before each step.
    """
    return registering("optimiser", name, options, **values)


def augmentation(name: str, options: type | None = None) -> Callable[[Made], Made]:
    """A change of each training sample: ``change(sample, generator)`` returns the new Sample.

    See data.batches.changed.Sample. All that is random must come from ``generator``.
    """
    return registering("augmentation", name, options)


def logger(name: str, options: type | None = None) -> Callable[[Made], Made]:
    """A logger on rank 0: ``make(run)`` returns one, see train_utils/loggers/interface.py."""
    return registering("logger", name, options)
