"""Load state dicts of this project, from files of torch.save, without running their code.

foreign.py handles state dicts of other systems.
"""

import pickle
import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.cfg.parse import parse_cfg
from models.errors import ModelError
from models.network.darknet import Darknet
from models.weights.darknet import head_layers, make_report, weight_tensors
from models.weights.report import WeightsReport

HEADS_FIX = ". fix: model.fresh_heads=true, which loads everything else"


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
        held = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if held is None:
            raise ModelError(f"{path} is damaged, or torch.save did not write it. fix: download it again") from error
        raise ModelError(
            f"{path} holds pickled objects ({held[1]}), which are not read because that would run code of the file."
            " fix: in the system that wrote it, save the tensors alone: torch.save(model.state_dict(), 'weights.pt')"
        ) from error


def load_weights_of_checkpoint(
    model: Darknet, weights: Mapping[str, Tensor], path: Path, fresh_heads: bool, network: Mapping[str, Any]
) -> WeightsReport:
    """Load a state dict of this project, of the network that its checkpoint describes.

    The convolutions before [yolo] are left out with fresh_heads, and if they are for another class
    count. Raises ModelError, and changes nothing, at the first tensor that is missing, unexpected,
    of another shape or not finite, and for heads that learnt with other anchors or another reach.
    """
    own = model.state_dict()
    heads = tuple(f"layers.{layer}." for layer in sorted(head_layers(model)))
    num_classes = class_count(model, weights.get(f"layers.{model.heads[0].layer - 1}.conv.weight"))
    fresh_heads = fresh_heads or num_classes not in (None, model.num_classes)
    wanted = [name for name in own if not (fresh_heads and name.startswith(heads))]
    for name in dict.fromkeys([*wanted, *(name for name in weights if name not in own)]):
        ours, theirs = (f"shape {tuple(state[name].shape)}" if name in state else "none" for state in (own, weights))
        if ours != theirs:
            hint = ". fix: use the model=, model.cfg= and model.width= that the checkpoint was trained with"
            if name.startswith(heads):
                hint = HEADS_FIX
            raise ModelError(f"{path}: {name} needs {ours}, the file has {theirs}{hint}")
    if not fresh_heads:
        _compare_decoding(model, network, path)
    check_values(path, ((name, weights[name]) for name in wanted))
    model.load_state_dict({name: weights[name] for name in wanted}, strict=False)
    return replace(report_of_state_dict(model, path, fresh_heads, num_classes), same_decoding=not fresh_heads)


def _compare_decoding(model: Darknet, network: Mapping[str, Any], path: Path) -> None:
    """Raise ModelError if the heads of a checkpoint's network stand for other boxes than these."""
    with torch.device("meta"):  # takes no memory
        theirs = Darknet(parse_cfg(network["cfg"], network["source"]), network["num_classes"], network["width"]).heads
    for key in ("anchors", "scale_x_y", "new_coords"):
        if [getattr(head, key) for head in model.heads] != [getattr(head, key) for head in theirs]:
            has = next(getattr(head, key) for head in theirs)
            fix = "fix: model.fresh_heads=true, or the options of its training"
            raise ModelError(f"the heads in {path} were trained with other {key} ({has}). {fix}")


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
    model: Darknet, path: Path, fresh_heads: bool, num_classes: int | None, note: str = ""
) -> WeightsReport:
    """The report for a state dict that filled all of `model`, or all but its heads."""
    heads = head_layers(model)
    loaded = [own for own in weight_tensors(model) if not (fresh_heads and own.layer in heads)]
    return make_report(model, path, loaded, num_classes, note)
