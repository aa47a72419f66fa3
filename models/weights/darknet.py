"""Darknet .weights files: the values of a network in file order, whole or cut after a layer.

For each convolution come the biases (beta with batch norm), then with batch norm gamma, running
mean and running variance, then the kernels as (filters, channels, rows, columns). A weighted
shortcut has its weights. file.py handles the header.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.errors import ModelError
from models.network.darknet import Darknet
from models.network.layers import stored_names
from models.weights.file import Values, WeightsFile, open_weights, write_weights
from models.weights.report import WeightsReport, plural


class WeightTensor(NamedTuple):
    """One stored tensor: the index of its layer, its name in the state dict, and the model's own
    tensor.
    """

    layer: int
    name: str
    tensor: Tensor


class _Extent(NamedTuple):
    """The part of a network in a file: all of it for `num_classes`, or its layers up to `cut`."""

    num_classes: int | None
    cut: int | None


def weight_tensors(model: Darknet) -> Iterator[WeightTensor]:
    """All tensors of a .weights file in the order Darknet stores them."""
    for index, layer in enumerate(model.layers):
        tensors = layer.state_dict(keep_vars=True)
        yield from (WeightTensor(index, f"layers.{index}.{name}", tensors[name]) for name in stored_names(layer))


def load_darknet_weights(model: Darknet, path: str | Path, fresh_heads: bool = False) -> WeightsReport:
    """Load a whole or partial .weights file, with its `seen` and `weights_version`.

    A partial file, such as darknet53.conv.74, ends after any layer; later layers keep their values.
    With fresh_heads the convolutions before the [yolo] sections keep theirs, whatever the file's
    class count. Raises ModelError, and changes nothing, if the file cannot be read, does not fit
    the network, has another class count without fresh_heads, or holds values that are not finite.
    """
    file = open_weights(Path(path))
    extent = _extent(model, file)
    tensors, heads = list(weight_tensors(model)), head_layers(model)
    if extent.num_classes not in (None, model.num_classes) and not fresh_heads:
        raise ModelError(
            f"{path} holds {file.held()} for {plural(extent.num_classes or 0, 'class')}, this model with"
            f" {model.num_classes} needs {_num_values(model, model.num_classes):,}. fix: use data of as many classes,"
            " or model.fresh_heads=true, which loads everything but the heads"
        )
    loads: list[tuple[WeightTensor, Values]] = []
    start = 0
    for own in tensors:
        if extent.cut is not None and own.layer > extent.cut:
            break
        count = own.tensor.numel()
        if extent.num_classes is not None and own.layer in heads:
            count = count // (5 + model.num_classes) * (5 + extent.num_classes)
        stored = file.values[start : start + count]
        start += count
        if fresh_heads and own.layer in heads:
            continue
        if not np.isfinite(stored).all():
            raise ModelError(f"{path} is damaged: values for {own.name} are not finite. fix: get the file again")
        loads.append((own, stored))
    with torch.no_grad():
        for own, stored in loads:
            own.tensor.copy_(torch.from_numpy(stored.copy()).view_as(own.tensor))  # the memory map is read-only
    model.seen, model.weights_version = file.seen, file.version
    loaded = {own.layer for own, _ in loads}
    return WeightsReport(
        path=file.path,
        layers_loaded=len(loaded),
        layers_total=len({own.layer for own in tensors}),
        values_loaded=sum(own.tensor.numel() for own, _ in loads),
        values_total=sum(own.tensor.numel() for own in tensors),
        heads_loaded=heads <= loaded,
        heads_left_out=fresh_heads and (extent.cut is None or min(heads) <= extent.cut),
        num_classes=extent.num_classes,
        model_classes=model.num_classes,
        cut=extent.cut,
        version=file.version,
        seen=file.seen,
    )


def save_darknet_weights(model: Darknet, path: str | Path, up_to_layer: int | None = None) -> int:
    """Write a .weights file, byte for byte as Darknet does; return the number of values.

    The header holds `model.weights_version` and `model.seen`. `up_to_layer` counts as in Darknet's
    `partial` command: layers 0 .. up_to_layer - 1 are written, so 74 makes a darknet53.conv.74. The
    file is written under another name and renamed. Raises ModelError if no layer before up_to_layer
    has weights, a value is not finite, or the file cannot be written.
    """
    end = len(model.layers) if up_to_layer is None else up_to_layer
    if not 1 <= end <= len(model.layers):
        raise ModelError(f"up_to_layer must be between 1 and this network's {len(model.layers)} layers, got {end}")
    tensors = [own for own in weight_tensors(model) if own.layer < end]
    if not tensors:
        raise ModelError(f"up_to_layer={end} leaves no layer with weights. fix: a larger one")
    for own in tensors:
        if not own.tensor.isfinite().all():
            raise ModelError(f"{own.name} has values that are not finite, so {path} is not written. fix: train anew")
    parts = (own.tensor.detach().cpu().float().contiguous().numpy() for own in tensors)
    return write_weights(Path(path), model.weights_version, model.seen, parts)


def head_layers(model: Darknet) -> set[int]:
    """The layers whose filters depend on the class count: the convolutions in front of [yolo]."""
    return {head.layer - 1 for head in model.heads}


def _extent(model: Darknet, file: WeightsFile) -> _Extent:
    """The part of this network in the file, by its number of values. ModelError if none fits."""
    count = len(file.values)
    needed = _num_values(model, model.num_classes)
    ends = _values_up_to_layers(model)
    if not file.extra_bytes:
        if count == needed:
            return _Extent(model.num_classes, None)
        cuts = [layer for layer, end in ends.items() if end == count]
        extra_classes, rest = divmod(count - needed, _num_values(model, model.num_classes + 1) - needed)
        num_classes = model.num_classes + extra_classes if rest == 0 and model.num_classes + extra_classes > 0 else None
        if cuts and num_classes is not None:
            raise ModelError(
                f"{file.path} holds {file.held()}, which is a whole file for {plural(num_classes, 'class')} as well as"
                f" one for {model.num_classes} cut behind layer {cuts[0]}. fix: give the model"
                f" {plural(num_classes, 'class')} if it is the former, else cut it elsewhere"
            )
        if cuts or num_classes is not None:
            return _Extent(num_classes, cuts[0] if cuts else None)
    nearest = min(ends, key=lambda layer: abs(ends[layer] - count))
    cut = "" if ends[nearest] == needed else f"; a file cut behind layer {nearest} has {ends[nearest]:,}"
    raise ModelError(
        f"{file.path} holds {file.held()}, this network with {plural(model.num_classes, 'class')} and width"
        f" {model.width:g} needs {needed:,}{cut}. fix: set model.cfg and model.width as the file was made, or get the"
        " file again"
    )


def _values_up_to_layers(model: Darknet) -> dict[int, int]:
    """For each layer with weights the number of values up to its end."""
    end = 0
    ends = {}
    for own in weight_tensors(model):
        end += own.tensor.numel()
        ends[own.layer] = end
    return ends


def _num_values(model: Darknet, num_classes: int) -> int:
    """Number of values in a whole .weights file of this network for `num_classes` classes."""
    heads = head_layers(model)
    return sum(
        own.tensor.numel() // (5 + model.num_classes) * (5 + num_classes) if own.layer in heads else own.tensor.numel()
        for own in weight_tensors(model)
    )
