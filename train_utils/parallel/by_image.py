"""A batch that torch computes image by image, so an image's bits do not depend on the others.

A kernel sums eight images in another order than four, and vector and scalar instructions differ in
the last bit of an exponential. A network called with ``Images`` instead of a tensor computes every
operator for one image at a time, whatever its layers are (torch's override protocol). An image then
gives the same bits on any rank. Only batch norm looks at all images: see sync_batchnorm.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

OPERATORS = "add radd sub rsub mul rmul truediv rtruediv mod pow rpow neg gt ge lt le eq ne and or invert getitem bool"


class Images:
    """One tensor for each image of a batch, with the attributes and operators of a tensor.

    Results that are not tensors, such as a shape or dtype, must be equal for all images.
    ``random_states`` holds a CPU generator state for each image, which advances as the image draws
    numbers. Plain tensors in an operation are used for every image.
    """

    __iter__ = None  # a tensor would iterate over its first dimension, of size 1

    def __init__(self, each: Sequence[Any], random_states: list[Tensor]) -> None:
        self.each = tuple(each)
        self.random_states = random_states

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], _: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        """Call a torch function once for each image."""
        states = _first([*arguments, *(named or {}).values()]).random_states
        outside = torch.default_generator.get_state()
        results = []
        for image in range(len(states)):
            torch.default_generator.set_state(states[image])
            own = {key: _pick(value, image) for key, value in (named or {}).items()}
            results.append(function(*_pick(arguments, image), **own))
            states[image] = torch.default_generator.get_state()
        torch.default_generator.set_state(outside)
        return _together(results, states)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(Tensor, name)
        if callable(attribute):
            return partial(_call, attribute, self)
        return _together([getattr(image, name) for image in self.each], self.random_states)


def _call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return Images.__torch_function__(function, (), arguments, named)


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: _call(function, *arguments)


for _name in OPERATORS.split():
    setattr(Images, f"__{_name}__", _method(getattr(Tensor, f"__{_name}__")))


def _first(value: Any) -> Any:
    """The first Images in nested sequences; None where there are none."""
    if isinstance(value, (tuple, list)):
        return next((found for found in map(_first, value) if found is not None), None)
    return value if isinstance(value, Images) else None


def _pick(value: Any, image: int) -> Any:
    """Replace each Images in nested sequences by the tensor of one image."""
    if isinstance(value, Images):
        return value.each[image]
    if type(value) in (tuple, list):
        return type(value)(_pick(item, image) for item in value)
    return value


def _together(results: list[Any], random_states: list[Tensor]) -> Any:
    """Merge the results of a function for each image into one result for all."""
    first = results[0]
    if isinstance(first, Tensor):
        return Images(results, random_states)
    if isinstance(first, (tuple, list)) and any(isinstance(item, Tensor) for item in first):
        return tuple(_together(list(column), random_states) for column in zip(*results, strict=True))
    assert all(result == first for result in results), "images of one batch take different ways through the network"
    return first
