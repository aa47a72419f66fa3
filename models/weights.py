"""Files of weights: Darknet's, those of torch.save, and the report of what was loaded.

A .weights file is a header, then float32 values, all little-endian. The header is major, minor,
revision (int32), then the number of images seen in training, unsigned as in Darknet: 64 bits from
version 0.2 on, 32 bits before. Each convolution has its biases (beta with batch norm), with batch
norm also gamma, running mean and running variance, then the kernels as (filters, channels, rows,
columns). The file may be cut after any layer.
"""

import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models.cfg import ModelError, parse_cfg, regular
from models.config import COCO_SYNONYMS
from models.darknet import Darknet, Version
from models.graph import BN_EPS
from models.heads import RawPart
from models.layers import Convolution

VERSION_BYTES = 12
MAX_HEADER_BYTES = 20
MAX_ENTRIES = 1_000_000  # of a file of torch.save; those of published networks have thousands
MAX_DEPTH = 100  # of lists in lists
MOST = 1e6  # of a value, and its square of a variance: other bytes, read as float32, go up to 1e38
Tensors = Mapping[str, Tensor]  # by name
Rows = Sequence[int | None]  # of the classes in a file; None: it lacks the class
SAME_NETWORK = "set model.cfg, model.width and model.box_bins as when the file was made"


@dataclass(frozen=True)
class WeightsReport:
    """What a network loaded from a file of weights."""

    path: Path
    loaded: frozenset[int]  # layers of convolutions
    layers_total: int
    model_classes: int  # of the network
    num_classes: int | None = None  # of the file; None: unknown
    heads_left_out: bool = False  # the file's convolutions before [yolo] sections were not loaded
    cut: int | None = None  # the last layer of a partial file
    same_decoding: bool = False  # the file says how its heads are decoded, and the network does the same
    other_layer: str = ""  # the first layer that computes something else than in the file
    names: Sequence[str] = ()  # of the file's classes
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
        if self.other_layer:
            text += f"; {self.other_layer}"
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
        for name in stored_names(layer):
            yield index, f"layers.{index}.{name}", tensors[name]


def class_parts(model: Darknet) -> dict[int, RawPart]:
    """The convolutions whose filters depend on the class count, by layer."""
    return {part.layer: part for head in model.heads for part in head.parts if part.per_class}


def left_out(model: Darknet, rows: Rows | None) -> tuple[str, ...]:
    """How the names of the tensors begin that are not loaded with these ``rows`` of the heads."""
    return tuple(f"layers.{layer}." for layer in class_parts(model)) if rows is None else ()


def with_classes(model: Darknet, num_classes: int) -> Darknet:
    """The same network for that many classes; a new one has no values."""
    if num_classes == model.num_classes:
        return model
    with torch.device("meta"):
        return Darknet(model.cfg, num_classes, model.width)


@dataclass(frozen=True)
class ClassNames:
    """How a file of weights calls its classes, and which are wanted; empty: not known."""

    of_file: Sequence[str] = ()
    wanted: Sequence[str] = ()
    partial: bool = False  # heads for other classes keep boxes, objectness and the classes that both have

    def rows(self, in_file: int | None, here: int) -> tuple[Rows | None, str]:
        """For each class its row in the file, or None if it has none, and a note for the report.

        None instead of all rows: the heads are left out. The arguments are class counts.
        """
        known = list(self.of_file)
        wanted = list(self.wanted)
        if (len(known), len(wanted)) != (in_file, here):  # the names are not known
            return range(here) if in_file == here else None, ""
        rows: Rows | None = class_order(known, wanted) if in_file == here else None
        if rows == [*range(here)]:
            return rows, ""
        if rows is None and self.partial and not (_are_numbers(known) or _are_numbers(wanted)):
            orders = [class_order(known, [name]) for name in wanted]
            rows = [order[0] if order else None for order in orders]
        if rows is None:
            return None, f"; its classes are {_listed(known)}, here {_listed(wanted)}"
        kept = [name for name, row in zip(wanted, rows, strict=True) if row is not None]
        fresh = [name for name in wanted if name not in kept]
        note = f"; its heads kept boxes, objectness and {len(kept)} of {here} classes by name: {_listed(kept)}"
        return rows, note + f"; fresh: {_listed(fresh)}" * bool(fresh)


UNNAMED = ClassNames()


def _listed(names: Sequence[str]) -> str:
    return (", ".join(names[:4]) or "none") + ", ..." * (len(names) > 4)


def _with_class_rows(part: RawPart, own: Tensor, stored: Tensor, rows: Rows) -> Tensor:
    """The ``stored`` tensor of a head, with these ``rows`` of classes; None: the ``own``."""
    box = part.fixed // part.per_class  # each anchor has the rows of its box and objectness, then its classes
    shape = part.per_class, -1
    filled = own.clone().unflatten(0, shape)
    stored = stored.unflatten(0, shape)
    filled[:, :box] = stored[:, :box]
    for number, row in enumerate(rows):
        if row is not None:
            filled[:, box + number] = stored[:, box + row]
    tensor: Tensor = filled.flatten(0, 1)
    return tensor


def fill_network(
    model: Darknet, path: Path, tensors: Tensors, eps: float, rows: Rows | None, **facts: Any
) -> WeightsReport:
    """Put checked tensors of a file into a network, and report on it with the ``facts``.

    The file's batch norm adds ``eps`` to the variances. Where the network's adds another number,
    the difference goes into the running variances, so that detection stays the same. The heads take
    these ``rows`` of classes (ClassNames); None: they keep their values.
    """
    heads = class_parts(model)
    loads = {}
    for name, own in model.state_dict().items():
        part = heads.get(int(name.split(".")[1]))
        found = tensors.get(name)
        if found is not None and part is not None:
            found = _with_class_rows(part, own, found, rows) if rows is not None and own.ndim else None
        if found is not None:
            is_variance = name.endswith(".running_var")
            loads[name] = (found + (eps - model.bn_eps)).clamp(min=0) if is_variance else found
    model.load_state_dict(loads, strict=False)
    layers = {layer: name in loads for layer, name, _ in weight_tensors(model)}
    partial = [*heads] if rows is not None and None in rows else []
    loaded = frozenset(layer for layer, found in layers.items() if found and layer not in partial)
    return WeightsReport(path, loaded, len(layers), model.num_classes, heads_left_out=rows is None, **facts)


def check_frozen(model: Darknet, report: WeightsReport | None) -> None:
    """Raise ModelError if a frozen convolution keeps random values: ``report`` lacks its layer."""
    for layer, _, _ in weight_tensors(model):
        if layer < model.num_frozen and (report is None or layer not in report.loaded):
            fix = f"model.freeze={layer}, or model.weights=<a file that has it for these classes>"
            where = f"layer {layer} of {model.cfg.source}"
            raise ModelError(f"model.freeze freezes {where}, whose weights are random", fix)


def _seen_type(version: Version) -> np.dtype[np.unsignedinteger]:
    return np.dtype("<u8" if version[0] * 10 + version[1] >= 2 else "<u4")  # Darknet's own rule


def class_order(of_network: list[str], names: list[str]) -> list[int] | None:
    """The number in a network of each of ``names``; None if it lacks one, or has one for two.

    Darknet's words for COCO's classes (COCO_SYNONYMS) and COCO's own are the same. Names 0, 1, ...
    are those of networks without: then as many classes count as equal, in order.
    """
    for synonyms in ({}, COCO_SYNONYMS):  # a set may have both words, for two classes
        known = [synonyms.get(name, name) for name in of_network]
        wanted = [synonyms.get(name, name) for name in names]
        if len({*wanted} & {*known}) == len(wanted):
            return [known.index(name) for name in wanted]
    is_without = _are_numbers(of_network) or _are_numbers(names)
    return [*range(len(names))] if is_without and len(of_network) == len(names) else None


def _are_numbers(names: list[str]) -> bool:
    return names == [*map(str, range(len(names)))]


def load_darknet_weights(model: Darknet, path: str | Path, classes: ClassNames = UNNAMED) -> WeightsReport:
    """Load a whole or partial .weights file, with its `seen` and `weights_version`.

    A partial file may end after any layer; later layers keep their values. So do the convolutions
    before [yolo] sections if the file has another class count, or other ``classes``. Raises
    ModelError, and changes nothing, if the file is unreadable, of another network or not finite.
    """
    path = Path(path)
    version, seen, values = _open_weights(path)
    num_classes, cut = _extent(model, path, len(values))
    in_file = num_classes or model.num_classes  # a cut file has as many heads as it has
    rows, note = classes.rows(in_file, model.num_classes)
    loads = {}
    start = 0
    for _, name, tensor in weight_tensors(with_classes(model, in_file)):
        if start == len(values):  # of a cut file
            break
        end = start + tensor.numel()
        stored = torch.from_numpy(values[start:end].copy())  # the memory map is read-only
        if tensor.ndim == 4 and not stored.any():
            raise ModelError(f"{path}: {name} is all zeros, as where a download stopped", "download it again")
        loads[name] = stored.view(tensor.shape)
        start = end
    check_values(path, loads.items())
    report = fill_network(model, path, loads, model.bn_eps, rows, num_classes=num_classes, cut=cut, note=note)
    model.seen = seen
    model.weights_version = version
    return report


def _open_weights(path: Path) -> tuple[Version, int, np.ndarray]:
    """The version, the images seen and the mapped values of a .weights file."""
    try:
        with regular(path).open("rb") as file:
            header = file.read(MAX_HEADER_BYTES)
            size = path.stat().st_size
    except OSError as error:
        raise ModelError(f"cannot read the weights {path} ({error.strerror})", "set model.weights to a file") from error
    major, minor, revision = np.frombuffer(header.ljust(MAX_HEADER_BYTES, b"\xff"), "<i4", count=3).tolist()
    kind = _seen_type((major, minor, revision))
    start = VERSION_BYTES + kind.itemsize
    is_version = 0 <= major < 1000 and 0 <= minor < 1000 and revision >= 0
    if len(header) < MAX_HEADER_BYTES or size % 4 or not is_version:
        raise ModelError(
            f"{path} is not a Darknet .weights file, or damaged: it begins with {header[:VERSION_BYTES]!r}",
            "download it again if this is a web page or a git-lfs pointer; let a file of torch.save end in .pt",
        )
    seen = int(np.frombuffer(header, kind, count=1, offset=VERSION_BYTES)[0])
    return (major, minor, revision), seen, np.memmap(path, "<f4", "r", start, ((size - start) // 4,))


def _extent(model: Darknet, path: Path, count: int) -> tuple[int | None, int | None]:
    """The class count of a whole file with ``count`` values, and the last layer of a cut one.

    The other of the two is None. Raises ModelError if no count of classes or layers fits.
    """
    sizes: Counter[int] = Counter()  # by layer
    for layer, _, tensor in weight_tensors(model):
        sizes[layer] += tensor.numel()
    needed = sizes.total()
    if count == needed:
        return model.num_classes, None
    for layer, end in zip(sizes, accumulate(sizes.values()), strict=True):
        if count == end:
            return None, layer
    of_class = 0
    for layer, part in class_parts(model).items():
        of_class += sizes[layer] // part.filters(model.num_classes) * part.per_class
    extra_classes, rest = divmod(count - needed, of_class)
    if rest == 0 and model.num_classes + extra_classes > 0:
        return model.num_classes + extra_classes, None
    network = f"this network with {model.num_classes} classes and width {model.width:g}"
    fix = f"{SAME_NETWORK}, or download it again"
    raise ModelError(f"{path} holds {count:,} values, {network} needs {needed:,}", fix)


def save_darknet_weights(model: Darknet, path: str | Path, up_to_layer: int | None = None) -> int:
    """Write a .weights file, byte for byte as Darknet does; return the number of values.

    `up_to_layer` counts as in Darknet's `partial` command: 74 makes a darknet53.conv.74. Raises
    ModelError if it is out of range, Darknet has no linear_xy, bn_eps or place for a layer, or a
    value is not finite.
    """
    path = Path(path)
    layers = len(model.layers)
    end = layers if up_to_layer is None else up_to_layer
    tensors = [(name, tensor.detach()) for layer, name, tensor in weight_tensors(model) if layer < end]
    if not tensors or end > layers:
        raise ModelError(f"up_to_layer must be between 1 and this network's {layers} layers, got {end}")
    for index, layer in enumerate(model.layers[:end]):
        if not stored_names(layer) and [*layer.parameters()]:
            what = f"the weights of layer {index}, a [{model.cfg.layers[index].kind}]"
            raise ModelError(f"Darknet's files have no place for {what}", f"up_to_layer={index}, or a checkpoint")
    unknown = []
    if model.bn_eps != BN_EPS:
        unknown.append(f"bn_eps={model.bn_eps:g}")
    if model.heads[0].linear_xy:
        unknown.append("linear_xy")
    if unknown:
        raise ModelError(f"Darknet cannot read {' and '.join(unknown)} of {model.cfg.source}", "keep the checkpoint")
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
    model: Darknet, weights: Tensors, path: Path, network: dict[str, Any], classes: ClassNames = UNNAMED
) -> WeightsReport:
    """Load a state dict of this project; ``network`` is what its checkpoint says of the network.

    The convolutions before [yolo] are left out if they are for other ``classes`` or another number
    of anchors. Raises ModelError, and changes nothing, at the first other tensor that does not fit,
    and for heads that learnt with other anchors or another decoding.
    """
    source = network_of_checkpoint(network, path)
    num_classes = network["num_classes"]
    rows, note = classes.rows(num_classes, model.num_classes)
    other = [
        key
        for key in "anchors scale_x_y new_coords linear_xy".split()
        if [getattr(head, key) for head in model.heads] != [getattr(head, key) for head in source.heads]
    ]
    if class_parts(model) != class_parts(source) or (other and {*(rows or ())} != {*range(num_classes)}):
        rows, note = None, ""
    elif other:
        has = getattr(source.heads[0], other[0])
        raise ModelError(f"the heads in {path} were trained with other {other[0]} ({has})", "use the same here")
    skipped = left_out(model, rows)
    loads, needed = (
        {name: tensor for name, tensor in tensors.items() if not name.startswith(skipped)}
        for tensors in (weights, with_classes(model, num_classes).state_dict())
    )
    check_shapes(path, needed, loads, SAME_NETWORK)
    check_values(path, loads.items())
    return fill_network(
        model,
        path,
        loads,
        source.bn_eps,
        rows,
        num_classes=num_classes,
        same_decoding=rows is not None,
        note=note,
        other_layer=other_layer(model, source),
        names=classes.of_file,
    )


def other_layer(model: Darknet, source: Darknet) -> str:
    """The first layer that computes something else in two networks of the same shapes, in words."""
    for index, section in enumerate(source.cfg.layers[: len(model.layers)]):
        is_free = section.kind == "dropout" or index in class_parts(model)
        if not is_free and _function_of(source, index) != _function_of(model, index):
            trained = ", ".join(map("=".join, section.options.items()))
            return f"layer {index}, [{section.kind}], was trained with other options: {trained}"
    return ""


def _function_of(model: Darknet, index: int) -> str:
    """What a layer computes, and of what; not the eps of batch norm, which fill_network fits."""
    layer = model.layers[index]
    settings = {key: value for key, value in vars(layer).items() if key[0] != "_" and key != "training"}
    return re.sub("eps=[^,]*", "", f"{model.sources[index]} {layer} {settings}")


def network_of_checkpoint(network: dict[str, Any], path: object, weights: Tensors | None = None) -> Darknet:
    """The network that a checkpoint describes, with its ``weights`` or without memory for any.

    Raises ModelError if the .cfg is wrong or the weights do not fit; ``path`` names the checkpoint.
    """
    text = network["cfg"]
    shape = network["num_classes"], network["width"]
    with torch.device("meta"):  # a forged .cfg gets no memory
        shell = Darknet(parse_cfg(text, f"{path}, {network['source']}"), *shape)
    if weights is None:
        return shell
    check_shapes(path, shell.state_dict(), weights, "use another checkpoint")
    check_values(path, weights.items())
    model = Darknet(parse_cfg(text, network["source"]), *shape)
    model.load_state_dict(weights)
    return model


def check_shapes(path: object, own: Tensors, weights: Tensors, fix: str) -> None:
    """Raise ModelError at the first name with tensors of two shapes, or with one tensor only."""
    for name in dict.fromkeys([*own, *weights]):
        shapes = []
        for tensor in (own.get(name), weights.get(name)):
            shapes.append(f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else "no tensor")
        ours, theirs = shapes
        if ours != theirs:
            raise ModelError(f"{path}: {name} needs {ours}, the file has {theirs}", fix)


def read_tensor_file(path: Path) -> Any:
    """Read a file of torch.save to the CPU, without running any code in it.

    Raises ModelError if it is missing, damaged or has pickled objects, OSError if not permitted.
    """
    if not path.is_file():
        raise ModelError(f"{path} is not a file", "set model.weights to a .weights or .pt file")
    path.open("rb").close()  # a file without read permission is not damaged
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's, about classes of its own in old files
            # Mapped: an optimiser's state stays on disk. Torch maps none whose name is not Unicode.
            mapped = zipfile.is_zipfile(path) and str(path).encode("utf-8", "replace").decode() == str(path)
            content = torch.load(str(path), map_location="cpu", weights_only=True, mmap=mapped)
        return plain_content(content, path.stat().st_size)
    except Exception as error:  # damaged bytes can break any step of reading, with any error
        damaged = f"{path} is damaged, or torch.save did not write it", "download it again"
        raise ModelError(*of_pickle(path, error) or damaged) from error


def of_pickle(path: Path, error: Exception) -> tuple[str, str] | None:
    """Sentence and fix for a file that torch refused for its pickled objects; else None."""
    pickled = re.search(r"GLOBAL (\S+)", str(error))
    if pickled is None:
        return None
    sentence = f"{path} holds pickled objects ({pickled[1]}), not read because that would run code in the file"
    alone = "save the tensors alone: torch.save(model.state_dict(), 'weights.pt')"
    return sentence, f"in the system that wrote it, {alone}"


def plain_content(content: Any, file_bytes: int) -> Any:
    """What torch.load read from a file of that size, as plain dicts, lists, tuples and tensors.

    A forged file of a kilobyte may hold lists without end, tensors of gigabytes and objects with
    false attributes. Anything but text and numbers becomes the name of its type. Raises ValueError
    for more than MAX_ENTRIES, MAX_DEPTH or the bytes that a file of that size can have.
    """
    entries = MAX_ENTRIES
    room = 4 * file_bytes + 2**20  # tensors may share their storage, as averages do

    def walk(value: Any, depth: int) -> Any:
        nonlocal entries, room
        entries -= 1
        if isinstance(value, Tensor):
            tensor = Tensor.detach(value)  # without attributes of its own
            if tensor.layout == torch.strided:  # others are refused where they are read
                room -= tensor.nbytes
                if tensor.device.type != "cpu" or tensor.nbytes > tensor.untyped_storage().nbytes():
                    raise ValueError("a tensor lacks values")
            value = tensor
        if min(entries, room, MAX_DEPTH - depth) < 0:
            raise ValueError("its content is too large for a file of its size")
        if isinstance(value, dict):
            return {key: walk(entry, depth + 1) for key, entry in dict.items(value)}
        if isinstance(value, list | tuple):
            kind = list if isinstance(value, list) else tuple
            return kind(walk(entry, depth + 1) for entry in value)
        return value if type(value) in (Tensor, str, int, float, bool, type(None)) else type(value).__name__

    return walk(content, 0)


def check_values(path: object, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ModelError at the first tensor whose values cannot be those of a network.

    They are not finite, not plain, variances below zero or beyond MOST. A Darknet file of another
    network with as many values looks like that.
    """
    for name, tensor in tensors:
        is_plain = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_complex()
        if not is_plain or not (values := tensor.float()).isfinite().all():
            raise ModelError(f"{path}: {name} has values that are not finite or not plain", "use other weights")
        is_variance = name.endswith("running_var")
        low, high = (0, MOST**2) if is_variance else (-MOST, MOST)
        fits = ((values >= low) & (values <= high)).all()
        if tensor.is_floating_point() and not fits:  # batch norm counts its steps
            what = f"values beyond {high:g}" + " or below zero" * is_variance
            raise ModelError(f"{path}: {name} has {what}, so the file is of another network", SAME_NETWORK)
