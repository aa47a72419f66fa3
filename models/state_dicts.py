"""Load state dicts, of this project or another PyTorch system, without running code of their files.

Other systems name tensors differently (module_list.0.Conv2d.weight, models.0.conv1.weight), but
those that build modules from a .cfg register them in its order. So the n-th convolution of a state
dict is matched with the n-th of the network, and likewise batch norms, if all shapes agree.
"""

import pickle
import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.cfg import parse_cfg
from models.darknet import Darknet
from models.errors import ModelError
from models.weights import WeightsReport, head_layers, make_report, weight_tensors

CONTAINERS = ("model", "state_dict", "model_state_dict")  # keys under which checkpoints keep a state dict
NORM_NAMES = {"weight", "bias", "running_mean", "running_var"}
Tensors = dict[str, Tensor]  # of one convolution or batch norm, by the last part of their names


def read_tensor_file(path: Path) -> Any:
    """Read a file of torch.save to the CPU, without running any code of the file.

    Raises ModelError if the file cannot be read, is damaged, or holds pickled objects.
    """
    if not path.is_file():
        raise ModelError(f"{path} is no file. fix: set model.weights to a .weights or .pt file")
    path.open("rb").close()  # an error of the disk is not a damaged file
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's, about its own classes in files of old versions
            # Memory-mapped, so unused parts (an optimiser's state) stay on disk.
            return torch.load(str(path), map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # damaged bytes can break any step of reading, with any error
        pickled = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if pickled is None:
            raise ModelError(f"{path} is damaged, or torch.save did not write it. fix: download it again") from error
        raise ModelError(
            f"{path} holds pickled objects ({pickled[1]}), which are not read because that would run code of the file."
            " fix: in the system that wrote it, save the tensors alone: torch.save(model.state_dict(), 'weights.pt')"
        ) from error


def load_weights_of_checkpoint(
    model: Darknet, weights: Mapping[str, Tensor], path: Path, network: Mapping[str, Any]
) -> WeightsReport:
    """Load a state dict of this project, of the network that its checkpoint describes.

    The convolutions before [yolo] are left out if they are for other classes or another number of
    anchors. Raises ModelError, and changes nothing, at the first other tensor that is missing,
    unexpected, of another shape or not finite, and for heads of the same size that learnt with
    other anchors or another reach.
    """
    own, num_classes = model.state_dict(), network["num_classes"]
    heads = tuple(f"layers.{layer}." for layer in sorted(head_layers(model)))
    of_heads = [name for name in own if name.startswith(heads)]
    leave_out = num_classes != model.num_classes or any(
        name in weights and weights[name].shape != own[name].shape for name in of_heads
    )
    wanted = [name for name in own if not (leave_out and name in of_heads)]
    for name in dict.fromkeys([*wanted, *(name for name in weights if name not in own)]):
        ours, theirs = (f"shape {tuple(state[name].shape)}" if name in state else "none" for state in (own, weights))
        if ours != theirs:
            raise ModelError(
                f"{path}: {name} needs {ours}, the file has {theirs}. fix: use the model=, model.cfg= and model.width= "
                "that the checkpoint was trained with"
            )
    if not leave_out:
        _compare_decoding(model, network, path)
    check_values(path, ((name, weights[name]) for name in wanted))
    model.load_state_dict({name: weights[name] for name in wanted}, strict=False)
    return replace(report_of_state_dict(model, path, leave_out, num_classes), same_decoding=not leave_out)


def _compare_decoding(model: Darknet, network: Mapping[str, Any], path: Path) -> None:
    """Raise ModelError if the heads of a checkpoint's network stand for other boxes than these."""
    with torch.device("meta"):  # takes no memory
        theirs = Darknet(parse_cfg(network["cfg"], network["source"]), network["num_classes"], network["width"]).heads
    for key in ("anchors", "scale_x_y", "new_coords"):
        if [getattr(head, key) for head in model.heads] != [getattr(head, key) for head in theirs]:
            has = next(getattr(head, key) for head in theirs)
            raise ModelError(f"the heads in {path} were trained with other {key} ({has}). fix: use the same here")


def check_values(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ModelError at the first tensor that is not plain, on the CPU, and finite."""
    for name, tensor in tensors:
        plain = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_complex()
        if not plain or tensor.device.type != "cpu":
            raise ModelError(f"{path}: {name} is not a plain tensor. fix: save the weights as float32")
        if not tensor.float().isfinite().all():
            raise ModelError(f"{path}: {name} has values that are not finite. fix: use other weights")


def class_count(model: Darknet, kernels: Tensor | None) -> int | None:
    """The class count of the kernels before a network's first head; None if unknown."""
    if kernels is None or kernels.ndim != 4:
        return None
    count, rest = divmod(len(kernels), len(model.heads[0].anchors))
    return count - 5 if rest == 0 and count > 5 else None


def report_of_state_dict(
    model: Darknet, path: Path, leave_out: bool, num_classes: int | None, note: str = ""
) -> WeightsReport:
    """The report for a state dict that filled all of `model`, or all but its heads."""
    heads = head_layers(model)
    loaded = [own for own in weight_tensors(model) if not (leave_out and own.layer in heads)]
    return make_report(model, path, loaded, num_classes, note)


def load_foreign_state_dict(model: Darknet, content: Any, path: Path) -> WeightsReport:
    """Copy the state dict of another PyTorch system into `model`.

    `content` comes from read_tensor_file: a state dict, or a dictionary with one under a key of
    CONTAINERS. Batch norm counters and anchors are ignored. The convolutions before [yolo] keep
    their values if the file has another class count. Raises ModelError, and
    changes nothing, if there is no state dict or a module differs; the error names the first one.
    """
    state, key = _state_dict(content, path)
    own, layers = list(weight_tensors(model)), head_layers(model)
    ours = _modules(((tensor.name, tensor.tensor) for tensor in own), model.cfg.source)
    theirs = _modules(state.items(), path)
    first = [name for name, _ in ours[0]].index(f"layers.{model.heads[0].layer - 1}.conv")
    num_classes = class_count(model, next((tensors["weight"] for _, tensors in theirs[0][first:]), None))
    leave_out = num_classes != model.num_classes
    loads: list[tuple[Tensor, str, Tensor]] = []
    for kind, own_modules, other_modules in zip(("convolution", "batch norm"), ours, theirs, strict=True):
        pairs: Iterable[Any] = zip_longest(own_modules, other_modules, fillvalue=("none", {}))
        for number, ((mine, wanted), (name, their)) in enumerate(pairs, start=1):
            is_head = mine in {f"layers.{layer}.conv" for layer in layers}
            if _shapes(wanted, leave_out and is_head) != _shapes(their, leave_out and is_head):
                raise ModelError(
                    f"{path}: {kind} {number} is {name} with {_shapes(their)}, here it is {mine} with {_shapes(wanted)}"
                    ". fix: set model.cfg and model.width as when the file was made"
                )
            if not (leave_out and is_head):
                loads += [(wanted[part], f"{name}.{part}", their[part]) for part in wanted]
    check_values(path, ((name, tensor) for _, name, tensor in loads))
    with torch.no_grad():
        for target, _, tensor in loads:
            target.copy_(tensor)
    note = f"state dict{key} of another system, matched by order and shape"
    return report_of_state_dict(model, path, leave_out, num_classes, note)


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
