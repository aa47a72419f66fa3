"""State dicts of other PyTorch systems: one function for each family of names.

Systems that build modules from a .cfg name tensors differently (module_list.0.Conv2d.weight,
models.0.conv1.weight), but register them in its order. So the n-th kernels of a state dict are
those of the network's n-th convolution, and likewise biases, gammas, means and variances, if all
shapes agree. The eps of their batch norm is not in the file; its name tells the system.

A file of timm's darknet53 or cspdarknet53, trained on ImageNet, holds the first layers of a
network. There images are normalised, and one convolution makes both paths of a CSP stage; here the
first convolution normalises, and each path has its own. There they are padded with their mean
colour, here with black, so maps differ slightly at the edges.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models import weights
from models.cfg import ModelError
from models.darknet import Darknet
from models.graph import BN_EPS
from models.layers import Convolution

CONTAINERS = ("model", "state_dict", "model_state_dict")  # keys under which checkpoints keep a state dict
TORCH_BN_EPS = 1e-5  # timm's, too
# By the name of a batch norm: ultralytics/yolov3 (archive); YOLOX and later Ultralytics; here.
BN_EPS_OF = {"BatchNorm2d": 1e-4, "bn": 1e-3, "norm": BN_EPS}
TIMM_STEM, TIMM_STAGES = "stem.conv1", 5
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's colours
Role = tuple[str, int]  # the last part of a tensor's name, and its number of dimensions
KERNELS: Role = ("weight", 4)


def load_foreign_state_dict(model: Darknet, content: Any, path: Path) -> weights.WeightsReport:
    """Copy the state dict of another PyTorch system into `model`.

    `content`: a state dict, or a dictionary with one under a key of CONTAINERS. Raises ModelError,
    and changes nothing, without one and at the first module that differs.
    """
    states = {}
    for key, state in {"": content, **(content if isinstance(content, Mapping) else {})}.items():
        if isinstance(state, Mapping) and {*map(type, state)} == {str} and {*map(type, state.values())} == {Tensor}:
            states[key] = state
    for chosen in ("", *CONTAINERS):
        if chosen in states:
            weights.check_values(path, states[chosen].items())
            load = _load_timm if f"{TIMM_STEM}.conv.weight" in states[chosen] else _load_in_order
            report = load(model, states[chosen], path)
            others = ", ".join(str(key) for key in states if key != chosen)
            note = others and f"; those under {chosen}, not those under {others}"
            return replace(report, note=note + report.note)
    raise ModelError(
        f"{path} holds no state dict, neither at the top level nor under {', '.join(CONTAINERS)}."
        " fix: torch.save(model.state_dict(), 'weights.pt') in the system that wrote it"
    )


def _load_in_order(model: Darknet, state: Mapping[str, Tensor], path: Path) -> weights.WeightsReport:
    """Load tensors that are in the order of the .cfg, whatever their names.

    Batch norm counters and anchors are ignored. The convolutions before [yolo] keep their values if
    the file has another class count or number of anchors.
    """
    ours = _by_role((name, tensor) for _, name, tensor in weights.weight_tensors(model))
    theirs = _by_role(state.items())
    # The class count follows from the filters of the convolution before the first head.
    part = model.heads[0].parts[-1]
    first = [name for name, _ in ours[KERNELS]].index(f"layers.{part.layer}.conv.weight")
    filters = sum(len(kernels) for _, kernels in theirs[KERNELS][first : first + 1])
    classes, rest = divmod(filters - part.fixed, part.per_class)
    num_classes = classes if rest == 0 and classes > 0 else None
    leave_out = num_classes != model.num_classes
    heads = tuple(f"layers.{layer}." for layer in weights.class_parts(model))
    loads: dict[str, Tensor] = {}
    for role in dict.fromkeys((KERNELS, *ours, *theirs)):
        pairs = zip_longest(ours[role], theirs[role], fillvalue=("nothing", torch.empty(0)))
        for (mine, target), (name, tensor) in pairs:
            is_left_out = leave_out and mine.startswith(heads)
            start = 1 if is_left_out else 0  # the number of filters may differ
            if target.shape[start:] != tensor.shape[start:]:
                place = f"in the place of {mine} of shape {tuple(target.shape)}"
                raise ModelError(f"{path}: {name} of shape {tuple(tensor.shape)} is {place}. {weights.SAME_NETWORK}")
            if not is_left_out:
                loads[mine] = tensor
    eps, note = model.bn_eps, ""
    for name, _ in theirs["running_var", 1][:1]:
        norm = name.split(".")[-2]
        eps = BN_EPS_OF.get(norm, TORCH_BN_EPS)
        if eps != model.bn_eps:
            note = f"; its batch norm, called {norm}, is taken to have eps={eps:g}"
    return weights.fill_network(model, path, loads, eps, num_classes=num_classes, heads_left_out=leave_out, note=note)


def _by_role(tensors: Iterable[tuple[str, Tensor]]) -> dict[Role, list[tuple[str, Tensor]]]:
    """Names and tensors, in order, by the last part of the name and the number of dimensions."""
    roles: dict[Role, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in tensors:
        last = name.rpartition(".")[2]
        if last != "num_batches_tracked" and "anchor" not in last:
            roles[last, tensor.ndim].append((name, tensor))
    return roles


def _load_timm(model: Darknet, state: Mapping[str, Tensor], path: Path) -> weights.WeightsReport:
    """Load timm's darknet53 or cspdarknet53 into the first layers."""
    layers = [(index, layer) for index, layer in enumerate(model.layers) if isinstance(layer, Convolution)]
    loads: dict[str, Tensor] = {}
    last = -1
    try:
        for (last, layer), tensors in zip(layers, _timm_convolutions(state), strict=False):
            for name, tensor in zip(weights.stored_names(layer), tensors, strict=True):
                loads[f"layers.{last}.{name}"] = tensor
    except (KeyError, IndexError, ValueError, RuntimeError) as error:  # forged shapes, too
        message = f"{path} is not a darknet53 or cspdarknet53 of timm ({error!r}). fix: download it again"
        raise ModelError(message) from error
    own = {name: tensor for name, tensor in model.state_dict().items() if name in loads}
    weights.check_shapes(path, own, loads, "fix: model.width=1 and a network that has this backbone")
    return weights.fill_network(model, path, loads, TORCH_BN_EPS, cut=last)


def _timm_convolutions(state: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Beta, gamma, mean, variance and kernels of each convolution of a .cfg, in its order."""

    def read(name: str) -> tuple[Tensor, ...]:
        keys = ("bn.bias", "bn.weight", "bn.running_mean", "bn.running_var", "conv.weight")
        return tuple(state[f"{name}.{key}"].float() for key in keys)

    beta, gamma, mean, variance, kernels = read(TIMM_STEM)
    kernels = kernels.unflatten(1, (3,)) / torch.tensor(STD)[:, None, None]  # RuntimeError unless there are 3 channels
    shift = (kernels * torch.tensor(MEAN)[:, None, None]).sum((1, 2, 3))
    yield beta, gamma, mean + shift, variance, kernels
    for stage in (f"stages.{number}" for number in range(TIMM_STAGES)):
        yield read(f"{stage}.conv_down")
        is_csp = f"{stage}.conv_exp.conv.weight" in state
        if is_csp:  # the path around the blocks, and the one through them
            yield from zip(*(tensor.chunk(2) for tensor in read(f"{stage}.conv_exp")), strict=True)
        for number in count():
            if f"{stage}.blocks.{number}.conv1.conv.weight" not in state:
                break
            yield read(f"{stage}.blocks.{number}.conv1")
            yield read(f"{stage}.blocks.{number}.conv2")
        if is_csp:
            yield read(f"{stage}.conv_transition_b")
            *norm, kernels = read(f"{stage}.conv_transition")
            around, through = kernels.chunk(2, dim=1)
            yield *norm, torch.cat((through, around), dim=1)  # a .cfg joins them in the other order
