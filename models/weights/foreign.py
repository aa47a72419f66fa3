"""State dicts of other PyTorch systems, matched with a network by order and shape.

Systems name tensors differently (module_list.0.Conv2d.weight, models.0.conv1.weight), but those
that build modules from a .cfg register them in its order. So the n-th convolution of a state dict
is matched with the n-th of the network, and likewise batch norms, provided that all shapes agree.
"""

from collections.abc import Iterable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.errors import ModelError
from models.network.darknet import Darknet
from models.weights.darknet import head_layers, weight_tensors
from models.weights.report import WeightsReport
from models.weights.state_dicts import HEADS_FIX, check_values, class_count, report_of_state_dict

CONTAINERS = ("model", "state_dict", "model_state_dict")  # keys under which checkpoints keep a state dict
NORM_NAMES = {"weight", "bias", "running_mean", "running_var"}


Tensors = dict[str, Tensor]  # of one convolution or batch norm, by the last part of their names


def load_foreign_state_dict(model: Darknet, content: Any, path: Path, fresh_heads: bool) -> WeightsReport:
    """Copy the state dict of another PyTorch system into `model`.

    `content` comes from read_tensor_file: a state dict, or a dictionary with one under a key of
    CONTAINERS. Batch norm counters and anchors are ignored. The convolutions before [yolo] keep
    their values with fresh_heads, and if the file has another class count. Raises ModelError, and
    changes nothing, if there is no state dict or a module differs; the error names the first one.
    """
    state, key = _state_dict(content, path)
    own, layers = list(weight_tensors(model)), head_layers(model)
    ours = _modules(((tensor.name, tensor.tensor) for tensor in own), model.cfg.source)
    theirs = _modules(state.items(), path)
    first = [name for name, _ in ours[0]].index(f"layers.{model.heads[0].layer - 1}.conv")
    num_classes = class_count(model, next((tensors["weight"] for _, tensors in theirs[0][first:]), None))
    fresh_heads = fresh_heads or num_classes not in (None, model.num_classes)
    loads: list[tuple[Tensor, str, Tensor]] = []
    for kind, own_modules, other_modules in zip(("convolution", "batch norm"), ours, theirs, strict=True):
        pairs: Iterable[Any] = zip_longest(own_modules, other_modules, fillvalue=("none", {}))
        for number, ((mine, wanted), (name, found)) in enumerate(pairs, start=1):
            is_head = mine in {f"layers.{layer}.conv" for layer in layers}
            if _shapes(wanted, fresh_heads and is_head) != _shapes(found, fresh_heads and is_head):
                fix = ". fix: set model.cfg and model.width as when the file was made"
                raise ModelError(
                    f"{path}: {kind} {number} is {name} with {_shapes(found)}, here it is {mine} with {_shapes(wanted)}"
                    + (HEADS_FIX if is_head and _shapes(wanted, True) == _shapes(found, True) else fix)
                )
            if not (fresh_heads and is_head):
                loads += [(wanted[part], f"{name}.{part}", found[part]) for part in wanted]
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


def _modules(
    tensors: Iterable[tuple[str, Tensor]], source: str | Path
) -> tuple[list[tuple[str, Tensors]], list[tuple[str, Tensors]]]:
    """The convolutions and the batch norms by name. Raises ModelError for anything else."""
    modules: dict[str, Tensors] = {}
    for full_name, tensor in tensors:
        prefix, _, name = full_name.rpartition(".")
        if name != "num_batches_tracked" and "anchor" not in name:
            modules.setdefault(prefix, {})[name] = tensor
    convolutions, norms = [], []
    for prefix, parts in modules.items():
        if "weight" in parts and parts["weight"].ndim == 4 and parts.keys() <= {"weight", "bias"}:
            convolutions.append((prefix, parts))
        elif parts.keys() == NORM_NAMES and all(tensor.ndim == 1 for tensor in parts.values()):
            norms.append((prefix, parts))
        else:
            raise ModelError(
                f"{source} holds {prefix} with {_shapes(parts)}, which is neither a convolution nor a batch norm: only "
                "those can be matched with another system's. fix: use the .weights file of this network"
            )
    return convolutions, norms


def _shapes(tensors: Tensors, any_filters: bool = False) -> dict[str, tuple[int, ...]]:
    """Shapes by name, without the first dimension if any_filters."""
    return {name: tuple(tensor.shape[any_filters:]) for name, tensor in sorted(tensors.items())}
