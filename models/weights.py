"""Darknet .weights files: a short header, then all values of all convolutions as little-endian float32.

Header: major, minor, revision (int32), then the number of images seen in training, int64 from version 0.2 on and
int32 before. Values: for each convolution in file order the biases (beta with batch norm), then with batch norm
gamma, running mean and running variance, then the kernels as (filters, channels, rows, columns).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from models.darknet import Darknet
from models.errors import ModelError
from models.layers import Convolution

Values = npt.NDArray[np.float32]


class WeightTensor(NamedTuple):
    """One stored tensor: the index of its layer, its name in the state dict, and the model's own tensor."""

    layer: int
    name: str
    tensor: Tensor


@dataclass(frozen=True)
class WeightsReport:
    """What a .weights file gave: `layers_loaded` convolutions of `layers_total`, and whether the heads were among them.

    `num_classes` is the file's class count, None for a backbone file, which has no heads.
    """

    path: Path
    version: tuple[int, int, int]
    seen: int
    layers_loaded: int
    layers_total: int
    heads_loaded: bool
    num_classes: int | None

    def __str__(self) -> str:
        heads = "" if self.heads_loaded else ", fresh heads"
        return f"initial weights: {self.layers_loaded} of {self.layers_total} convolutions of {self.path}{heads}"


def weight_tensors(model: Darknet) -> Iterator[WeightTensor]:
    """All tensors of a .weights file in the order Darknet stores them."""
    for index, layer in enumerate(model.layers):
        if not isinstance(layer, Convolution):
            continue
        names = ["conv.bias", "conv.weight"]
        if layer.norm is not None:
            names = ["norm.bias", "norm.weight", "norm.running_mean", "norm.running_var", "conv.weight"]
        tensors = layer.state_dict(keep_vars=True)
        yield from (WeightTensor(index, f"layers.{index}.{name}", tensors[name]) for name in names)


def load_darknet_weights(model: Darknet, path: str | Path, fresh_heads: bool = False) -> WeightsReport:
    """Set the model's values from a whole .weights file or a backbone file, as darknet53.conv.74; sets model.seen.

    A backbone file ends behind any convolution; the layers after it keep their values. With fresh_heads the
    convolutions in front of the [yolo] sections keep theirs, whatever class count the file was trained for.
    Nothing is changed unless all is well. Raises ModelError where the file cannot be read, does not fit the network,
    is of another class count without fresh_heads, or holds values that are not finite.
    """
    path = Path(path)
    version, seen, values = _open(path)
    tensors = list(weight_tensors(model))
    heads = {head.layer - 1 for head in model.heads}
    num_classes = _class_count(model, len(values), path)
    if num_classes is not None and num_classes != model.num_classes and not fresh_heads:
        raise ModelError(
            f"{path} holds {len(values):,} values for {num_classes} classes, this model with {model.num_classes} needs"
            f" {_num_values(model, model.num_classes):,}. fix: model.fresh_heads=true loads everything but the heads"
        )
    loads: list[tuple[Tensor, Values]] = []
    loaded: set[int] = set()
    start = 0
    for layer, name, tensor in tensors:
        if start == len(values):
            break  # a backbone file ends here
        count = tensor.numel()
        if num_classes is not None and layer in heads:
            count = count // (5 + model.num_classes) * (5 + num_classes)
        stored = values[start : start + count]
        start += count
        if fresh_heads and layer in heads:
            continue
        if not np.isfinite(stored).all():
            raise ModelError(f"{path} is damaged: values for {name} are not finite. fix: get the file again")
        loads.append((tensor, stored))
        loaded.add(layer)
    with torch.no_grad():
        for tensor, stored in loads:
            tensor.copy_(torch.from_numpy(stored.copy()).view_as(tensor))  # copied: the file is mapped read-only
    model.seen = seen
    total = len({tensor.layer for tensor in tensors})
    return WeightsReport(path, version, seen, len(loaded), total, heads <= loaded, num_classes)


def _open(path: Path) -> tuple[tuple[int, int, int], int, Values]:
    """Version, images seen and the mapped values of a .weights file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(20)
    except OSError as error:
        message = f"cannot read the weights {path} ({error.strerror}). fix: set model.weights to a file"
        raise ModelError(message) from error
    if len(header) < 20:
        raise ModelError(f"{path} has {size} bytes, too few for a Darknet .weights file. fix: get it again")
    major, minor, revision = (int(number) for number in np.frombuffer(header, "<i4", count=3))
    if not (0 <= major < 1000 and 0 <= minor < 1000 and revision >= 0):
        version = f"{major}.{minor}.{revision}"
        raise ModelError(
            f"{path} begins with version {version}, so it is no Darknet .weights file. fix: check the path"
        )
    wide = major * 10 + minor >= 2  # Darknet's own rule
    seen = int(np.frombuffer(header, "<i8" if wide else "<i4", count=1, offset=12)[0])
    start = 20 if wide else 16
    if (size - start) % 4 or size == start:
        raise ModelError(f"{path} holds {size - start} bytes of values, no whole number of float32. fix: get it again")
    return (major, minor, revision), seen, np.memmap(path, "<f4", mode="r", offset=start)


def _class_count(model: Darknet, count: int, path: Path) -> int | None:
    """The class count for which a file of `count` values is whole; None where it is a backbone file of this network.

    Raises ModelError where it is neither.
    """
    total = _num_values(model, model.num_classes)
    per_class = _num_values(model, model.num_classes + 1) - total
    extra_classes, rest = divmod(count - total, per_class)
    if rest == 0 and model.num_classes + extra_classes >= 1:
        return model.num_classes + extra_classes
    end = 0
    ends: dict[int, int] = {}  # layer -> number of values up to its end
    for layer, _, tensor in weight_tensors(model):
        end += tensor.numel()
        ends[layer] = end
    if count in ends.values():
        return None
    nearest = min(ends, key=lambda layer: abs(ends[layer] - count))
    raise ModelError(
        f"{path} holds {count:,} values, this network with {model.num_classes} classes and width {model.width:g} needs"
        f" {total:,} (up to layer {nearest} {ends[nearest]:,}). fix: set model.cfg and model.width as the file was made"
    )


def _num_values(model: Darknet, num_classes: int) -> int:
    """Number of values in a whole .weights file of this network for `num_classes` classes."""
    heads = {head.layer - 1 for head in model.heads}
    return sum(
        tensor.numel() // (5 + model.num_classes) * (5 + num_classes) if layer in heads else tensor.numel()
        for layer, _, tensor in weight_tensors(model)
    )
