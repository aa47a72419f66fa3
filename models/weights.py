"""Darknet .weights files, state dicts, and the report of what was loaded. No code in them runs.

A .weights file is a header, then float32 values, all little-endian. The header is major, minor,
revision (int32), then the number of images seen in training, unsigned as in Darknet: 64 bits from
version 0.2 on, 32 bits before. Each convolution has its biases (beta with batch norm), with batch
norm also gamma, running mean and running variance, then the kernels as (filters, channels, rows,
columns). The file may be cut after any layer.

Other PyTorch systems name tensors differently (module_list.0.Conv2d.weight, models.0.conv1.weight),
but those that build modules from a .cfg register them in its order. So the n-th kernels of a state
dict are those of the network's n-th convolution, and likewise biases, gammas, means and variances,
if all shapes agree. The eps of their batch norm is not in the file; its name tells the system.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models.cfg import parse_cfg
from models.darknet import Darknet, Version
from models.errors import ModelError
from models.graph import BN_EPS
from models.heads import RawPart
from models.layers import Convolution
from models.tensor_files import SAME_NETWORK, check_values

Role = tuple[str, int]  # the last part of a tensor's name, and its number of dimensions
VERSION_BYTES, MAX_HEADER_BYTES = 12, 20
CONTAINERS = ("model", "state_dict", "model_state_dict")  # keys under which checkpoints keep a state dict
KERNELS: Role = ("weight", 4)
# By the name of a batch norm: ultralytics/yolov3 (archive); YOLOX and later Ultralytics; here.
BN_EPS_OF = {"BatchNorm2d": 1e-4, "bn": 1e-3, "norm": BN_EPS}
TORCH_BN_EPS = 1e-5


@dataclass(frozen=True)
class WeightsReport:
    """What a network loaded from a file of weights."""

    path: Path
    loaded: frozenset[int]  # layers of convolutions
    layers_total: int
    num_classes: int | None  # of the file; None: unknown
    model_classes: int  # of the network
    heads_left_out: bool  # the file's convolutions before [yolo] sections were not loaded
    cut: int | None = None  # the last layer of a partial file
    same_decoding: bool = False  # the file says how its heads are decoded, and the network does the same
    note: str = ""  # what else to know: which weights of the file, or what its class names mean for the heads

    @property
    def is_whole(self) -> bool:
        """Whether every convolution was loaded."""
        return len(self.loaded) == self.layers_total

    def __str__(self) -> str:
        text = f"initial weights: {len(self.loaded)} of {self.layers_total} convolutions from {self.path}"
        if self.cut is not None:
            text += f"; the file ends after layer {self.cut}, later layers start fresh"
        if self.heads_left_out:
            text += "; its heads were left out and start fresh"
            if self.num_classes not in (None, self.model_classes):
                text += f" (for {self.num_classes} classes, here {self.model_classes})"
        return text + self.note


def stored_names(layer: nn.Module) -> tuple[str, ...]:
    """Names in a layer's state dict of the tensors that a .weights file stores, in its order."""
    if not isinstance(layer, Convolution):
        return ()
    if layer.norm is None:
        return "conv.bias", "conv.weight"
    return "norm.bias", "norm.weight", "norm.running_mean", "norm.running_var", "conv.weight"


def weight_tensors(model: Darknet) -> Iterator[tuple[int, str, Tensor]]:
    """Layer, state dict name and tensor of all that a .weights file stores, in its order."""
    for index, layer in enumerate(model.layers):
        tensors = layer.state_dict(keep_vars=True)
        yield from ((index, f"layers.{index}.{name}", tensors[name]) for name in stored_names(layer))


def _class_parts(model: Darknet) -> dict[int, RawPart]:
    """The convolutions whose filters depend on the class count, by layer."""
    return {part.layer: part for head in model.heads for part in head.parts if part.per_class}


def report_of(
    model: Darknet, path: Path, *, num_classes: int | None = None, left_out: bool = False, cut: int | None = None
) -> WeightsReport:
    """The report on a file that filled all layers up to `cut`, or all but the heads."""
    layers = frozenset(layer for layer, _, _ in weight_tensors(model))
    loaded = layers - set(_class_parts(model)) if left_out else layers
    if cut is not None:
        loaded &= set(range(cut + 1))
    return WeightsReport(path, loaded, len(layers), num_classes, model.num_classes, left_out, cut)


def check_frozen(model: Darknet, report: WeightsReport | None) -> None:
    """Raise ModelError if a frozen convolution keeps random values: ``report`` lacks its layer."""
    loaded = report.loaded if report is not None else frozenset[int]()
    fresh = [layer for layer, _, _ in weight_tensors(model) if layer < model.num_frozen and layer not in loaded]
    if fresh:
        raise ModelError(
            f"model.freeze freezes layer {fresh[0]} of {model.cfg.source}, whose weights are random."
            f" fix: model.freeze={fresh[0]}, or model.weights=<a file that has it for these classes>"
        )


def _seen_type(version: Version) -> np.dtype[np.unsignedinteger]:
    return np.dtype("<u8" if version[0] * 10 + version[1] >= 2 else "<u4")  # Darknet's own rule


def class_order(of_network: list[str], names: list[str]) -> list[int] | None:
    """The number in a network of each of ``names``; None if it lacks one.

    Names 0, 1, ... are those of networks without: then as many classes count as equal, in order.
    """
    if set(names) <= set(of_network):
        return [of_network.index(name) for name in names]
    places = [*range(len(names))]
    is_without = [*map(str, places)] in (of_network, names)
    return places if is_without and len(of_network) == len(names) else None


def load_darknet_weights(
    model: Darknet, path: str | Path, *, of_file: Sequence[str] = (), names: Sequence[str] = ()
) -> WeightsReport:
    """Load a whole or partial .weights file, with its `seen` and `weights_version`.

    A partial file, such as darknet53.conv.74, may end after any layer; later layers keep their
    values. So do the convolutions before [yolo] sections if the file has another class count, or
    other classes: ``of_file`` and ``names`` are as in load_weights_of_checkpoint. Raises
    ModelError, and changes nothing, if the file cannot be read, does not fit the network, or holds
    values that are not finite.
    """
    path = Path(path)
    version, seen, values = _open_weights(path)
    num_classes, cut = _extent(model, path, len(values))
    heads = _class_parts(model)
    order, note = _order_of_rows(of_file, names, num_classes)
    leave_out = order is None or num_classes not in (None, model.num_classes)
    loads, start = dict[str, Tensor](), 0
    for layer, name, tensor in weight_tensors(model):
        if cut is not None and layer > cut:
            break
        count = tensor.numel()
        if num_classes is not None and layer in heads:
            count = count // heads[layer].filters(model.num_classes) * heads[layer].filters(num_classes)
        if not (leave_out and layer in heads):
            stored = torch.from_numpy(values[start : start + count].copy())  # the memory map is read-only
            loads[name] = stored.view_as(tensor)
        start += count
    check_values(path, loads.items())
    if empty := [name for name, tensor in loads.items() if tensor.ndim == 4 and not tensor.any()]:
        raise ModelError(f"{path}: {empty[0]} is all zeros, as where a download stopped. fix: download it again")
    model.load_state_dict(_with_moved_classes(model, loads, order) if order else loads, strict=False)
    model.seen, model.weights_version = seen, version
    report = report_of(model, path, num_classes=num_classes, left_out=leave_out, cut=cut)
    return replace(report, note=note)


def _open_weights(path: Path) -> tuple[Version, int, np.ndarray]:
    """The version, the images seen and the mapped values of a .weights file."""
    try:
        with path.open("rb") as file:
            header, size = file.read(MAX_HEADER_BYTES), path.stat().st_size
    except OSError as error:
        message = f"cannot read the weights {path} ({error.strerror}). fix: set model.weights to a file"
        raise ModelError(message) from error
    major, minor, revision = np.frombuffer(header.ljust(MAX_HEADER_BYTES, b"\xff"), "<i4", count=3).tolist()
    kind = _seen_type((major, minor, revision))
    start = VERSION_BYTES + kind.itemsize
    if len(header) < MAX_HEADER_BYTES or size % 4 or not (0 <= major < 1000 and 0 <= minor < 1000 and revision >= 0):
        raise ModelError(
            f"{path} is not a Darknet .weights file, or damaged: it begins with {header[:VERSION_BYTES]!r}. fix:"
            " download it again if this is a web page or a git-lfs pointer; let a file of torch.save end in .pt"
        )
    seen = int(np.frombuffer(header, kind, count=1, offset=VERSION_BYTES)[0])
    return (major, minor, revision), seen, np.memmap(path, "<f4", "r", start, ((size - start) // 4,))


def _extent(model: Darknet, path: Path, count: int) -> tuple[int | None, int | None]:
    """The class count of a whole file with ``count`` values, and the last layer of a cut one.

    The other of the two is None. Raises ModelError if no count of classes or layers fits.
    """
    ends: dict[int, int] = {}  # by layer: the number of values in a file that is cut after it
    parts, needed, of_class = _class_parts(model), 0, 0
    for layer, _, tensor in weight_tensors(model):
        needed += tensor.numel()
        if layer in parts:
            of_class += tensor.numel() // parts[layer].filters(model.num_classes) * parts[layer].per_class
        ends[layer] = needed
    if count == needed:
        return model.num_classes, None
    if cuts := [layer for layer, end in ends.items() if end == count]:
        return None, cuts[0]
    extra_classes, rest = divmod(count - needed, of_class)
    if rest == 0 and model.num_classes + extra_classes > 0:
        return model.num_classes + extra_classes, None
    raise ModelError(
        f"{path} holds {count:,} values, this network with {model.num_classes} classes and width {model.width:g} needs"
        f" {needed:,}. {SAME_NETWORK}, or download it again"
    )


def save_darknet_weights(model: Darknet, path: str | Path, up_to_layer: int | None = None) -> int:
    """Write a .weights file, byte for byte as Darknet does; return the number of values.

    The header holds `model.weights_version` and `model.seen`. `up_to_layer` counts as in Darknet's
    `partial` command: layers 0 .. up_to_layer - 1 are written, so 74 makes a darknet53.conv.74. The
    file is written under another name and renamed. Raises ModelError if up_to_layer is out of
    range, the format has no place for a layer or for bn_eps, or a value is not finite.
    """
    path, end = Path(path), len(model.layers) if up_to_layer is None else up_to_layer
    tensors = [(name, tensor.detach()) for layer, name, tensor in weight_tensors(model) if layer < end]
    if not tensors or end > len(model.layers):
        raise ModelError(f"up_to_layer must be between 1 and this network's {len(model.layers)} layers, got {end}")
    for index, layer in enumerate(model.layers[:end]):
        if not stored_names(layer) and [*layer.parameters()]:
            raise ModelError(
                f"Darknet's files have no place for the weights of layer {index}, a [{model.cfg.layers[index].kind}]. "
                f"fix: up_to_layer={index}, or keep the checkpoint"
            )
    if model.bn_eps != BN_EPS:
        raise ModelError(f"Darknet cannot read bn_eps={model.bn_eps:g} of {model.cfg.source}. fix: keep the checkpoint")
    check_values(path, tensors)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(np.array(model.weights_version, "<i4").tobytes())
        file.write(np.array([model.seen], _seen_type(model.weights_version)).tobytes())
        for _, tensor in tensors:
            file.write(tensor.cpu().numpy().astype("<f4").tobytes())
    temporary.replace(path)
    return sum(tensor.numel() for _, tensor in tensors)


def load_weights_of_checkpoint(
    model: Darknet, weights: Mapping[str, Tensor], path: Path, network: Mapping[str, Any],
    *, of_file: Sequence[str] = (), names: Sequence[str] = (),
) -> WeightsReport:  # fmt: skip
    """Load a state dict of this project; ``network`` is what its checkpoint says of the network.

    ``of_file`` are its class names and ``names`` those wanted (class_order). In another order, the
    rows of classes move with their names. The convolutions
    before [yolo] are left out if they are for other classes or another number of anchors. Raises
    ModelError, and changes nothing, at the first other tensor that is missing, unexpected, of
    another shape or not finite, and for heads of the same size that learnt with other anchors or
    another decoding.
    """
    own, num_classes = model.state_dict(), network["num_classes"]
    heads = tuple(f"layers.{layer}." for layer in _class_parts(model))
    of_heads = [name for name in own if name.startswith(heads)]
    order, note = _order_of_rows(of_file, names, num_classes)
    leave_out = (
        order is None
        or num_classes != model.num_classes
        or any(name in weights and weights[name].shape != own[name].shape for name in of_heads)
    )
    if order and leave_out:
        note = ""
    elif order:
        weights = _with_moved_classes(model, weights, order)
    left_out = of_heads if leave_out else []
    wanted, loads = ({name: state[name] for name in state if name not in left_out} for state in (own, weights))
    check_shapes(path, wanted, loads, SAME_NETWORK)
    source = network_of_checkpoint(network, path)
    if not leave_out:
        for key in ("anchors", "scale_x_y", "new_coords"):
            if [getattr(head, key) for head in model.heads] != [getattr(head, key) for head in source.heads]:
                has = getattr(source.heads[0], key)
                raise ModelError(f"the heads in {path} were trained with other {key} ({has}). fix: use the same here")
    check_values(path, loads.items())
    model.load_state_dict(for_bn_eps(loads, source.bn_eps, model), strict=False)
    report = report_of(model, path, num_classes=num_classes, left_out=leave_out)
    return replace(report, same_decoding=not leave_out, note=note)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + ", ..." * (len(names) > 4)


def _order_of_rows(
    of_file: Sequence[str], names: Sequence[str], num_classes: int | None
) -> tuple[list[int] | None, str]:
    """The row in the file of each class, and a note; empty: as they are, None: other classes."""
    if not len(of_file) == len(names) == num_classes:
        return [], ""
    order = class_order(list(of_file), list(names))
    if order is None:
        return None, f" (its classes are {_listed(of_file)}, here {_listed(names)})"
    if order == sorted(order):
        return [], ""
    return order, f"; the class rows of its heads follow the names, from {_listed(of_file)} to {_listed(names)}"


def _with_moved_classes(model: Darknet, weights: Mapping[str, Tensor], order: list[int]) -> dict[str, Tensor]:
    """``weights`` with the rows of classes in the heads in another ``order``."""
    moved = dict(weights)
    for layer, part in _class_parts(model).items():
        rows = torch.arange(part.filters(len(order))).view(part.per_class, -1)  # of each anchor: its box, then classes
        of_box, classes = rows.split((part.fixed // part.per_class, len(order)), dim=1)
        places = torch.cat((of_box, classes[:, order]), dim=1).flatten()
        for name, tensor in weights.items():
            if name.startswith(f"layers.{layer}.") and tensor.ndim:
                moved[name] = tensor[places]
    return moved


def network_of_checkpoint(
    network: Mapping[str, Any], path: object, weights: Mapping[str, Tensor] | None = None
) -> Darknet:
    """The network that a checkpoint describes, with its ``weights`` or without memory for any.

    Raises ModelError if the .cfg is wrong or the weights do not fit; ``path`` names the checkpoint.
    """
    text, *shape = (network[key] for key in ("cfg", "num_classes", "width"))
    with torch.device("meta"):  # a forged .cfg gets no memory
        shell = Darknet(parse_cfg(text, f"{path}, {network['source']}"), *shape)
    if weights is None:
        return shell
    check_shapes(path, shell.state_dict(), weights, "fix: use another checkpoint")
    check_values(path, weights.items())
    model = Darknet(parse_cfg(text, network["source"]), *shape)
    model.load_state_dict(weights)
    return model


def check_shapes(path: object, own: Mapping[str, Tensor], weights: Mapping[str, Tensor], fix: str) -> None:
    """Raise ModelError at the first name with tensors of two shapes, or with one tensor only."""
    for name in dict.fromkeys([*own, *weights]):
        tensors = own.get(name), weights.get(name)
        ours, theirs = (f"shape {tuple(one.shape)}" if isinstance(one, Tensor) else "no tensor" for one in tensors)
        if ours != theirs:
            raise ModelError(f"{path}: {name} needs {ours}, the file has {theirs}. {fix}")


def load_foreign_state_dict(model: Darknet, content: Any, path: Path) -> WeightsReport:
    """Copy the state dict of another PyTorch system into `model`.

    `content` comes from read_tensor_file: a state dict, or a dictionary with one under a key of
    CONTAINERS. Batch norm counters and anchors are ignored. The convolutions before [yolo] keep
    their values if the file has another class count or number of anchors. Raises ModelError, and
    changes nothing, without a state dict and at the first module that differs.
    """
    ours = _by_role((name, tensor) for _, name, tensor in weight_tensors(model))
    state, note = _state_dict(content, path)
    theirs = _by_role(state.items())
    heads = tuple(f"layers.{layer}." for layer in _class_parts(model))
    # The class count follows from the filters of the convolution before the first head.
    part = model.heads[0].parts[-1]
    first = [name for name, _ in ours[KERNELS]].index(f"layers.{part.layer}.conv.weight")
    filters = sum(len(kernels) for _, kernels in theirs[KERNELS][first : first + 1])
    count, rest = divmod(filters - part.fixed, part.per_class)
    num_classes = count if rest == 0 and count > 0 else None
    leave_out = num_classes != model.num_classes
    loads, found = dict[str, Tensor](), list[tuple[str, Tensor]]()
    for role in dict.fromkeys((KERNELS, *ours, *theirs)):
        pairs = zip_longest(ours[role], theirs[role], fillvalue=("nothing", torch.empty(0)))
        for (mine, target), (name, tensor) in pairs:
            left_out = leave_out and mine.startswith(heads)
            if target.shape[left_out:] != tensor.shape[left_out:]:
                raise ModelError(
                    f"{path}: {name} of shape {tuple(tensor.shape)} is in the place of {mine} of shape"
                    f" {tuple(target.shape)}. {SAME_NETWORK}"
                )
            if not left_out:
                loads[mine] = tensor
                found.append((name, tensor))
    check_values(path, found)
    norms = [name.split(".")[-2] for name, _ in found if name.endswith(".running_var")]
    eps = BN_EPS_OF.get(norms[0], TORCH_BN_EPS) if norms else model.bn_eps
    if eps != model.bn_eps:
        note += f"; its batch norm, called {norms[0]}, is taken to have eps={eps:g}"
    model.load_state_dict(for_bn_eps(loads, eps, model), strict=False)
    return replace(report_of(model, path, num_classes=num_classes, left_out=leave_out), note=note)


def for_bn_eps(tensors: Mapping[str, Tensor], eps: float, model: Darknet) -> dict[str, Tensor]:
    """``tensors`` of a network whose batch norm adds ``eps`` to the variances, for ``model``.

    The difference goes into the running variances, so that detection stays the same.
    """
    more = eps - model.bn_eps
    return {
        name: (tensor + more).clamp(min=0) if name.endswith(".running_var") else tensor
        for name, tensor in tensors.items()
    }


def _by_role(tensors: Iterable[tuple[str, Tensor]]) -> dict[Role, list[tuple[str, Tensor]]]:
    """Names and tensors, in order, by the last part of the name and the number of dimensions."""
    roles: dict[Role, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in tensors:
        last = name.rpartition(".")[2]
        if last != "num_batches_tracked" and "anchor" not in last:
            roles[last, tensor.ndim].append((name, tensor))
    return roles


def _state_dict(content: Any, path: Path) -> tuple[Mapping[str, Tensor], str]:
    """The state dict in a file's content, and a note on others there. Raises ModelError without."""
    nested = content if isinstance(content, Mapping) else {}
    states = {key: state for key, state in nested.items() if _is_state_dict(state)}
    if _is_state_dict(content):
        return content, ""
    if (chosen := next((key for key in CONTAINERS if key in states), None)) is not None:
        others = ", ".join(str(key) for key in states if key != chosen)
        return states[chosen], others and f"; those under {chosen}, not those under {others}"
    raise ModelError(
        f"{path} holds no state dict, neither at the top level nor under {', '.join(CONTAINERS)}."
        " fix: torch.save(model.state_dict(), 'weights.pt') in the system that wrote it"
    )


def _is_state_dict(state: Any) -> bool:
    pairs = state.items() if isinstance(state, Mapping) and state else [(None, None)]
    return all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in pairs)
