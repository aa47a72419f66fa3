"""State dicts of other PyTorch systems: one function for each family of names.

Systems that build modules from a .cfg name tensors differently (module_list.0.Conv2d.weight,
models.0.conv1.weight), but register them in its order. So the n-th kernels of a state dict are
those of the network's n-th convolution, and likewise biases, gammas, means and variances, if all
shapes agree. The eps of their batch norm is not in the file; its name tells the system.

A file of timm's darknet53 or cspdarknet53, trained on ImageNet, holds the first layers of a
network. There images are normalised, and one convolution makes both paths of a CSP stage; here the
first convolution normalises, and each path has its own. There they are padded with their mean
colour, here with black, so maps differ slightly at the edges.

In YOLOX images are BGR in 0..255, the first convolution is 3x3 on blocks of 2x2 pixels (here 6x6),
and objectness has a convolution of its own.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from models import weights
from models.cfg import ModelError
from models.darknet import Darknet
from models.graph import BN_EPS
from models.layers import Convolution
from models.weights import ClassNames, Tensors, WeightsReport

CONTAINERS = ("model", "state_dict", "model_state_dict")  # keys under which checkpoints keep a state dict
TORCH_BN_EPS = 1e-5  # timm's, too
# By the name of a batch norm: ultralytics/yolov3 (archive); YOLOX and later Ultralytics; here.
BN_EPS_OF = {"BatchNorm2d": 1e-4, "bn": 1e-3, "norm": BN_EPS}
TIMM_STEM = "stem.conv1"
MEAN = 0.485, 0.456, 0.406  # of ImageNet's colours
STD = 0.229, 0.224, 0.225
OBJECTNESS = "head.obj_preds."  # the beginning of a tensor's name, by which a file of YOLOX is known
YOLOX_BN_EPS = 1e-3
MOST_COLOUR = 255
LEAST_VARIANCE = 60  # of YOLOX's first map, for kernels of norm 1: thousands for 0..255, 1 if normalised
ROLES = "stems", "reg_convs", "reg_preds", "cls_convs", "cls_preds"  # of a head of YOLOX
Role = tuple[str, int]  # the last part of a tensor's name, and its number of dimensions
KERNELS: Role = ("weight", 4)


def load_foreign_state_dict(
    model: Darknet, content: Any, path: Path, classes: ClassNames = weights.UNNAMED
) -> WeightsReport:
    """Copy the state dict of another PyTorch system into `model`.

    `content`: a state dict, or a dictionary with one under a key of CONTAINERS. Raises ModelError,
    and changes nothing, without a state dict and at the first module that differs.
    """
    states = {}
    for key, state in {"": content, **(content if isinstance(content, Mapping) else {})}.items():
        if isinstance(state, Mapping):
            kinds = {*map(type, state)}, {*map(type, state.values())}
            if kinds == ({str}, {Tensor}):
                states[key] = state
    for chosen in ("", *CONTAINERS):
        if chosen in states:
            state = states[chosen]
            weights.check_values(path, state.items())
            if f"{TIMM_STEM}.conv.weight" in state:
                report = _load_timm(model, state, path)
            else:
                state = from_yolox(state, path) if f"{OBJECTNESS}0.weight" in state else state
                report = _load_in_order(model, state, path, classes)
            others = ", ".join(str(key) for key in states if key != chosen)
            note = others and f"; those under {chosen}, not those under {others}"
            return replace(report, note=note + report.note)
    raise ModelError(
        f"{path} holds no state dict, neither at the top level nor under {', '.join(CONTAINERS)}",
        "torch.save(model.state_dict(), 'weights.pt') in the system that wrote it",
    )


def _load_in_order(model: Darknet, state: Tensors, path: Path, classes: ClassNames) -> WeightsReport:
    """Load tensors that are in the order of the .cfg, whatever their names.

    Batch norm counters and anchors are ignored. The convolutions before [yolo] keep their values if
    the file has another class count, other classes or another number of anchors.
    """
    theirs = _by_role(state.items())
    # The class count follows from the filters of the convolution before the first head.
    part = model.heads[0].parts[-1]
    kernels = [layer for layer, _, tensor in weights.weight_tensors(model) if tensor.ndim == 4]
    first = kernels.index(part.layer)
    filters = sum(len(tensor) for _, tensor in theirs[KERNELS][first : first + 1])
    number, rest = divmod(filters - part.fixed, part.per_class)
    num_classes = number if rest == 0 and number > 0 else None
    rows, note = classes.rows(num_classes, model.num_classes)
    in_file = weights.with_classes(model, num_classes or model.num_classes)
    ours = _by_role((name, tensor) for _, name, tensor in weights.weight_tensors(in_file))
    skipped = weights.left_out(model, rows)
    loads = {}
    for role in dict.fromkeys((KERNELS, *ours, *theirs)):
        pairs = zip_longest(ours[role], theirs[role], fillvalue=("nothing", torch.empty(0)))
        for (mine, target), (name, tensor) in pairs:
            start = int(mine.startswith(skipped))  # heads that are left out may have other filters
            if target.shape[start:] != tensor.shape[start:]:
                own = f"{mine} of shape {tuple(target.shape)}"
                other = f"{name} of shape {tuple(tensor.shape)}"
                raise ModelError(f"{path}: {other} is in the place of {own}", weights.SAME_NETWORK)
            loads[mine] = tensor
    eps = model.bn_eps
    for name, _ in theirs["running_var", 1][:1]:
        norm = name.split(".")[-2]
        eps = BN_EPS_OF.get(norm, TORCH_BN_EPS)
        if eps != model.bn_eps:
            note = f"; its batch norm, called {norm}, is taken to have eps={eps:g}{note}"
    return weights.fill_network(model, path, loads, eps, rows, num_classes=num_classes, note=note)


def _by_role(tensors: Iterable[tuple[str, Tensor]]) -> dict[Role, list[tuple[str, Tensor]]]:
    """Names and tensors, in order, by the last part of the name and the number of dimensions."""
    roles = defaultdict(list)
    for name, tensor in tensors:
        last = name.rpartition(".")[2]
        if last != "num_batches_tracked" and "anchor" not in last:
            roles[last, tensor.ndim].append((name, tensor))
    return roles


def _load_timm(model: Darknet, state: Tensors, path: Path) -> WeightsReport:
    layers = [(index, layer) for index, layer in enumerate(model.layers) if isinstance(layer, Convolution)]
    loads = {}
    last = -1
    try:
        for (last, layer), tensors in zip(layers, _timm_convolutions(state), strict=False):
            for name, tensor in zip(weights.stored_names(layer), tensors, strict=True):
                loads[f"layers.{last}.{name}"] = tensor
    except (KeyError, IndexError, ValueError, RuntimeError) as error:  # forged shapes, too
        raise ModelError(f"{path} is not a darknet53 or cspdarknet53 file ({error!r})", "download it again") from error
    own = {name: tensor for name, tensor in model.state_dict().items() if name in loads}
    weights.check_shapes(path, own, loads, "model.width=1 and a network that has this backbone")
    return weights.fill_network(model, path, loads, TORCH_BN_EPS, (), cut=last)


def _timm_convolutions(state: Tensors) -> Iterator[tuple[Tensor, ...]]:
    """Beta, gamma, mean, variance and kernels of each convolution of a .cfg, in its order."""

    def read(name: str) -> tuple[Tensor, ...]:
        keys = ("bn.bias", "bn.weight", "bn.running_mean", "bn.running_var", "conv.weight")
        return tuple(state[f"{name}.{key}"].float() for key in keys)

    beta, gamma, mean, variance, kernels = read(TIMM_STEM)
    kernels = kernels.unflatten(1, (3,)) / torch.tensor(STD)[:, None, None]  # RuntimeError unless 3 channels
    shift = (kernels * torch.tensor(MEAN)[:, None, None]).sum((1, 2, 3))
    yield beta, gamma, mean + shift, variance, kernels
    for stage in (f"stages.{number}" for number in range(5)):
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


def from_yolox(state: Tensors, path: Path) -> dict[str, Tensor]:
    """YOLOX's tensors in the order of a .cfg, for RGB in 0..1. Raises ModelError for others."""
    try:
        stem = next(iter(state)).removesuffix(".conv.weight")
        kernels = state[f"{stem}.conv.weight"]
        variance = state[f"{stem}.bn.running_var"]
        is_old = (variance / kernels.flatten(1).norm(dim=1).square()).median() < LEAST_VARIANCE
        tensors = _in_order_of_cfg(state)
        for name in state:
            if name.startswith(OBJECTNESS):
                box = name.replace("obj", "reg")
                tensors[box] = torch.cat((tensors[box], tensors.pop(name)))
        if kernels.shape[1] == 12:  # columns, rows and colours of a block
            by_colour = kernels.unflatten(1, (2, 2, 3)).transpose(1, 3).flatten(1, 3)
            kernels = functional.pixel_shuffle(by_colour, 2)
        # Batch norm takes the scale of colours: kernels 255 times as large would hardly learn.
        gain = (variance + MOST_COLOUR**2 * YOLOX_BN_EPS) / (variance + YOLOX_BN_EPS)
        tensors[f"{stem}.conv.weight"] = kernels.flip(1)
        tensors[f"{stem}.bn.weight"] = state[f"{stem}.bn.weight"] * gain.sqrt()
        tensors[f"{stem}.bn.running_mean"] = state[f"{stem}.bn.running_mean"] / MOST_COLOUR
        tensors[f"{stem}.bn.running_var"] = variance / MOST_COLOUR**2
    except (KeyError, ValueError, IndexError, RuntimeError) as error:  # forged names and shapes
        raise ModelError(f"{path} is not a state dict of YOLOX ({error!r})", "download it again") from error
    if is_old:
        raise ModelError(f"{path} is of YOLOX before 0.1.1, for images of another scale", "use a newer file")
    return tensors


def _in_order_of_cfg(state: Tensors) -> dict[str, Tensor]:
    """The heads last, one after another; in a CSP stage conv2 and conv3 after the blocks."""
    stages: dict[str, int] = {}

    def place(name: str) -> tuple[int, int, int]:
        part, role, level, *_ = name.replace("obj", "reg").split(".")
        if part == "head":
            return 1, int(level), ROLES.index(role)
        stage, *inside = re.split(r"\.(m|conv\d)\.", name, maxsplit=1)
        return 0, stages.setdefault(stage, len(stages)), int(inside[:1] in (["conv2"], ["conv3"]))

    return {name: state[name] for name in sorted(state, key=place)}
