"""State dicts of other PyTorch systems, matched with a network by order and shape.

Systems name tensors differently (module_list.0.Conv2d.weight, models.0.conv1.weight), but those
that build modules from a .cfg register them in its order. So the n-th convolution of a state dict
is matched with the n-th of the network, and likewise batch norms, provided that all shapes agree.
"""

from collections.abc import Iterable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.errors import ModelError
from models.network.darknet import Darknet
from models.weights.darknet import head_layers, weight_tensors
from models.weights.report import WeightsReport
from models.weights.state_dicts import HEADS_FIX, check_values, class_count, report_of_state_dict

CONTAINERS = ("model", "state_dict", "model_state_dict")  # keys under which checkpoints keep a state dict
NORM_NAMES = {"weight", "bias", "running_mean", "running_var"}


class Module(NamedTuple):
    """The tensors of one convolution or batch norm by the last part of their names."""

    name: str
    tensors: dict[str, Tensor]

    def __str__(self) -> str:
        return f"{self.name} with {', '.join(f'{name} {tuple(t.shape)}' for name, t in sorted(self.tensors.items()))}"


class Modules(NamedTuple):
    """The convolutions and the batch norms of a network, each in its order."""

    convolutions: list[Module]
    norms: list[Module]


def load_foreign_state_dict(model: Darknet, content: Any, path: Path, fresh_heads: bool) -> WeightsReport:
    """Copy the state dict of another PyTorch system into `model`.

    `content` comes from read_tensor_file: a state dict, or a dictionary with one under a key of
    CONTAINERS. Batch norm counters and anchors are ignored. The convolutions before [yolo] keep
    their values with fresh_heads, and if the file has another class count. Raises ModelError, and
    changes nothing, if there is no state dict or a module differs; the error names the first one.
    """
    state, key = _state_dict(content, path)
    theirs = _sort(state.items(), path)
    own = list(weight_tensors(model))
    ours = _sort(((tensor.name, tensor.tensor) for tensor in own), model.cfg.source)
    heads = {tensor.name.rpartition(".")[0] for tensor in own if tensor.layer in head_layers(model)}
    first_head = [module.name for module in ours.convolutions].index(f"layers.{model.heads[0].layer - 1}.conv")
    kernels = next((module.tensors["weight"] for module in theirs.convolutions[first_head:]), None)
    num_classes = class_count(model, kernels)
    fresh_heads = fresh_heads or num_classes not in (None, model.num_classes)
    _check_same(ours, theirs, path, heads, fresh_heads)

    loads: list[tuple[Tensor, str, Tensor]] = []
    for mine, their in zip([*ours.convolutions, *ours.norms], [*theirs.convolutions, *theirs.norms], strict=True):
        if not (fresh_heads and mine.name in heads):
            loads += [(mine.tensors[name], f"{their.name}.{name}", their.tensors[name]) for name in mine.tensors]
    check_values(path, ((name, tensor) for _, name, tensor in loads))
    with torch.no_grad():
        for target, _, tensor in loads:
            target.copy_(tensor)

    note = f"state dict{key} of another system, matched by order and shape"
    return report_of_state_dict(model, path, fresh_heads, num_classes, note)


def _state_dict(content: Any, path: Path) -> tuple[Mapping[str, Tensor], str]:
    """The state dict in a file's content, and its key, for messages."""
    nested = [(content.get(key), f" '{key}'") for key in CONTAINERS] if isinstance(content, Mapping) else []
    for state, key in [(content, ""), *nested]:
        items = state.items() if isinstance(state, Mapping) else ()
        if items and all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in items):
            return state, key
    raise ModelError(
        f"{path} holds no state dict, neither at the top level nor under {', '.join(CONTAINERS)}."
        " fix: torch.save(model.state_dict(), 'weights.pt') in the system that wrote it"
    )


def _sort(tensors: Iterable[tuple[str, Tensor]], source: str | Path) -> Modules:
    """Group tensors into convolutions and batch norms. Raises ModelError for any other tensor."""
    modules: dict[str, Module] = {}
    for full_name, tensor in tensors:
        prefix, _, name = full_name.rpartition(".")
        if name != "num_batches_tracked" and "anchor" not in name:
            modules.setdefault(prefix, Module(prefix, {})).tensors[name] = tensor
    found = Modules([], [])
    for module in modules.values():
        weight, names = module.tensors.get("weight"), module.tensors.keys()
        if weight is not None and weight.ndim == 4 and names <= {"weight", "bias"}:
            found.convolutions.append(module)
        elif names == NORM_NAMES and all(tensor.ndim == 1 for tensor in module.tensors.values()):
            found.norms.append(module)
        else:
            raise ModelError(
                f"{source} holds {module}, which is neither a convolution nor a batch norm: only those can be matched"
                " with another system's. fix: use the .weights file of this network"
            )
    return found


def _check_same(ours: Modules, theirs: Modules, path: Path, heads: set[str], fresh_heads: bool) -> None:
    """Raise ModelError for the first module, in our order, whose tensors or shapes differ."""
    differences: list[tuple[float, str]] = []  # (our layer, message)
    for kind, own, other in zip(("convolution", "batch norm"), ours, theirs, strict=True):
        for number, (mine, their) in enumerate(zip_longest(own, other), start=1):
            is_head = mine is not None and mine.name in heads
            if _shapes(mine, fresh_heads and is_head) == _shapes(their, fresh_heads and is_head):
                continue
            hint = ". fix: set model.cfg and model.width as when the file was made"
            if is_head and _shapes(mine, True) == _shapes(their, True):
                hint = HEADS_FIX
            layer = float("inf") if mine is None else int(mine.name.split(".")[1])
            differences.append(
                (layer, f"{path}: {kind} {number} is {their or 'missing'}, here it is {mine or 'none'}{hint}")
            )
            break
    if differences:
        raise ModelError(min(differences)[1])


def _shapes(module: Module | None, any_filters: bool) -> dict[str, tuple[int, ...]] | None:
    """Shapes of a module's tensors by name, without the first dimension if any_filters."""
    if module is None:
        return None
    return {name: tuple(tensor.shape[1 if any_filters else 0 :]) for name, tensor in module.tensors.items()}
