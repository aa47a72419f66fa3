"""What a plugin imports to register its parts: one decorator for each kind (docs/extending.md).

from plugins import augmentation

@augmentation("grey")
def grey(sample, generator): ...
"""

from conf.extensions.parts import (
    activation,
    assigner,
    augmentation,
    callback,
    data_format,
    layer,
    logger,
    loss,
    optimiser,
)

__all__ = [
    "activation",
    "assigner",
    "augmentation",
    "callback",
    "data_format",
    "layer",
    "logger",
    "loss",
    "optimiser",
]
