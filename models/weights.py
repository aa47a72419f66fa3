"""Darknet .weights files, whole or cut after a layer, and the report of what was loaded.

A header, then float32 values, all little-endian. Header: major, minor, revision (int32), then the
number of images seen in training, unsigned as in Darknet: 64 bits from version 0.2 on, 32 bits
before. For each convolution come the biases (beta with batch norm), then with batch norm gamma,
running mean and running variance, then the kernels as (filters, channels, rows, columns). A
weighted shortcut has its weights.
"""

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from models.darknet import Darknet
from models.errors import ModelError
from models.layers import Convolution

Values = npt.NDArray[np.float32]
Version = tuple[int, int, int]
WEIGHTS_VERSION: Version = (0, 2, 5)  # what Darknet writes today
VERSION_BYTES, LONGEST_HEADER = 12, 20


@dataclass(frozen=True)
class WeightsReport:
    """What a network loaded from a file of weights.

    layers_loaded of layers_total: layers that have weights, above all convolutions.
    values_loaded of values_total: the values in them.
    heads_left_out: whether the file's convolutions before [yolo] sections were not loaded.
    num_classes: the file's class count, None for a partial file.
    model_classes: the network's class count.
    cut: the last layer with weights of a partial file, None for a whole file.
    version, seen: the header of a .weights file.
    same_decoding: whether the file says how its heads are decoded, and it is as here.
    note: anything else that the user should know.
    """

    path: Path
    layers_loaded: int
    layers_total: int
    values_loaded: int
    values_total: int
    heads_left_out: bool
    num_classes: int | None
    model_classes: int
    cut: int | None = None
    version: Version | None = None
    seen: int | None = None
    same_decoding: bool = False
    note: str = ""

    @property
    def has_other_classes(self) -> bool:
        """Whether the file's class count is known and not the network's."""
        return self.num_classes not in (None, self.model_classes)

    @property
    def is_whole(self) -> bool:
        """Whether every layer with weights was loaded."""
        return self.layers_loaded == self.layers_total

    def __str__(self) -> str:
        note = f"; {self.note}" if self.note else ""
        if self.is_whole:
            classes = f", {plural(self.num_classes, 'class')}" if self.num_classes is not None else ""
            seen = f", trained on {self.seen:,} images" if self.seen else ""
            return (
                f"initial weights: all {self.values_total:,} values of {self.path}"
                f" ({plural(self.layers_total, 'layer')} with weights{classes}{seen}){note}"
            )
        rest = []
        if self.cut is not None:
            rest.append(f"the file ends after layer {self.cut}, later layers start fresh")
        if self.heads_left_out:
            theirs = f" for {plural(self.num_classes, 'class')}" if self.num_classes is not None else ""
            rest.append(
                f"its heads{theirs} were left out and those for {plural(self.model_classes, 'class')} start fresh"
            )
        return (
            f"initial weights: {self.layers_loaded} of {plural(self.layers_total, 'layer')} with weights"
            f" ({self.values_loaded:,} of {self.values_total:,} values) from {self.path}; {'; '.join(rest)}{note}"
        )


def plural(count: int, noun: str) -> str:
    """`count` and the noun, in the plural unless count is 1, for messages."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun if count == 1 else noun + ending}"


@dataclass(frozen=True)
class WeightsFile:
    """An open .weights file: `values` mapped read-only, then `extra_bytes` that fill no value."""

    path: Path
    version: Version
    seen: int
    values: Values
    extra_bytes: int

    def describe(self) -> str:
        """The number of values in the file, for messages."""
        extra = f" and {self.extra_bytes}/4 of another" if self.extra_bytes else ""
        return f"{len(self.values):,} values{extra}"


def open_weights(path: Path) -> WeightsFile:
    """Read the header of a .weights file and map its values.

    Raises ModelError if the file cannot be read or does not begin with a Darknet header.
    """
    try:
        with path.open("rb") as file:
            header, size = file.read(LONGEST_HEADER), os.fstat(file.fileno()).st_size
    except OSError as error:
        message = f"cannot read the weights {path} ({error.strerror}). fix: set model.weights to a file"
        raise ModelError(message) from error
    if len(header) < LONGEST_HEADER:
        raise ModelError(f"{path} has {size} bytes, too few for a Darknet .weights file. fix: download it again")
    major, minor, revision = (int(number) for number in np.frombuffer(header, "<i4", count=3))
    if not (0 <= major < 1000 and 0 <= minor < 1000 and revision >= 0):
        raise ModelError(
            f"{path} is no Darknet .weights file: it begins with {header[:VERSION_BYTES]!r}. fix: download it again if "
            "this is a web page or a git-lfs pointer, and let files of torch.save end in .pt"
        )
    kind = _seen_type((major, minor, revision))
    start = VERSION_BYTES + kind.itemsize
    count, extra = divmod(size - start, 4)
    seen = int(np.frombuffer(header, kind, count=1, offset=VERSION_BYTES)[0])
    values = np.memmap(path, "<f4", mode="r", offset=start, shape=(count,))
    return WeightsFile(path, (major, minor, revision), seen, values, extra)


def write_weights(path: Path, version: Version, seen: int, parts: Iterable[Values]) -> int:
    """Write a .weights file atomically: under another name, then renamed to `path`.

    Returns the number of values. Raises ModelError if writing fails or `seen` does not fit.
    """
    kind = _seen_type(version)
    if not 0 <= seen <= np.iinfo(kind).max:
        raise ModelError(
            f"seen={seen:,} does not fit the {8 * kind.itemsize} bits of a header of version {version[0]}.{version[1]}."
            f" fix: write version {WEIGHTS_VERSION[0]}.{WEIGHTS_VERSION[1]}, or a smaller seen"
        )
    temporary = path.with_name(f"{path.name}.tmp")
    count = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(np.array(version, "<i4").tobytes() + np.array([seen], kind).tobytes())
                for part in parts:
                    file.write(np.ascontiguousarray(part, "<f4").data)
                    count += part.size
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ModelError(
            f"cannot write {path} ({error.strerror}). fix: choose a file in a folder that you may write to"
        ) from error
    return count


def _seen_type(version: Version) -> np.dtype[np.unsignedinteger]:
    wide = version[0] * 10 + version[1] >= 2  # Darknet's own rule
    return np.dtype("<u8") if wide else np.dtype("<u4")


class WeightTensor(NamedTuple):
    """A tensor of the model that is stored, with its layer and its name in the state dict."""

    layer: int
    name: str
    tensor: Tensor


def weight_tensors(model: Darknet) -> Iterator[WeightTensor]:
    """All tensors of a .weights file in the order Darknet stores them."""
    for index, layer in enumerate(model.layers):
        tensors = layer.state_dict(keep_vars=True)
        yield from (WeightTensor(index, f"layers.{index}.{name}", tensors[name]) for name in stored_names(layer))


def stored_names(layer: nn.Module) -> tuple[str, ...]:
    """State dict names of the tensors that a .weights file holds for a layer, in its order."""
    if not isinstance(layer, Convolution):
        return ()
    if layer.norm is None:
        return "conv.bias", "conv.weight"
    return "norm.bias", "norm.weight", "norm.running_mean", "norm.running_var", "conv.weight"


def load_darknet_weights(model: Darknet, path: str | Path) -> WeightsReport:
    """Load a whole or partial .weights file, with its `seen` and `weights_version`.

    A partial file, such as darknet53.conv.74, ends after any layer; later layers keep their values.
    So do the convolutions before the [yolo] sections if the file has another class count. Raises
    ModelError, and changes nothing, if the file cannot be read, does not fit the network, or holds
    values that are not finite.
    """
    file = open_weights(Path(path))
    num_classes, cut = _extent(model, file)
    tensors, heads = list(weight_tensors(model)), head_layers(model)
    leave_out = num_classes not in (None, model.num_classes)
    loads: list[tuple[WeightTensor, Values]] = []
    start = 0
    for own in tensors:
        if cut is not None and own.layer > cut:
            break
        count = own.tensor.numel()
        if num_classes is not None and own.layer in heads:
            count = count // (5 + model.num_classes) * (5 + num_classes)
        stored = file.values[start : start + count]
        start += count
        if leave_out and own.layer in heads:
            continue
        if not np.isfinite(stored).all():
            raise ModelError(f"{path} is damaged: values for {own.name} are not finite. fix: download it again")
        loads.append((own, stored))
    with torch.no_grad():
        for own, stored in loads:
            own.tensor.copy_(torch.from_numpy(stored.copy()).view_as(own.tensor))  # the memory map is read-only
    model.seen, model.weights_version = file.seen, file.version
    report = make_report(model, file.path, [own for own, _ in loads], num_classes)
    return replace(report, heads_left_out=leave_out, cut=cut, version=file.version, seen=file.seen)


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
    for index, layer in enumerate(model.layers[:end]):
        if not stored_names(layer) and any(True for _ in layer.parameters()):
            raise ModelError(
                f"Darknet's files have no place for the weights of layer {index}, a [{model.cfg.layers[index].kind}]. "
                f"fix: up_to_layer={index}, or keep the checkpoint"
            )
    if not tensors:
        raise ModelError(f"up_to_layer={end} leaves no layer with weights. fix: a larger one")
    for own in tensors:
        if not own.tensor.isfinite().all():
            raise ModelError(f"{own.name} has values that are not finite, so {path} is not written. fix: train anew")
    parts = (own.tensor.detach().cpu().float().contiguous().numpy() for own in tensors)
    return write_weights(Path(path), model.weights_version, model.seen, parts)


def make_report(
    model: Darknet, path: Path, loaded: Collection[WeightTensor], num_classes: int | None, note: str = ""
) -> WeightsReport:
    """The report for tensors of `model` loaded from a file; the rest counts as heads left out."""
    tensors, layers = list(weight_tensors(model)), {own.layer for own in loaded}
    return WeightsReport(
        path=path,
        layers_loaded=len(layers),
        layers_total=len({own.layer for own in tensors}),
        values_loaded=sum(own.tensor.numel() for own in loaded),
        values_total=sum(own.tensor.numel() for own in tensors),
        heads_left_out=len(loaded) < len(tensors),
        num_classes=num_classes,
        model_classes=model.num_classes,
        note=note,
    )


def head_layers(model: Darknet) -> set[int]:
    """The layers whose filters depend on the class count: the convolutions before a [yolo]."""
    return {head.layer - 1 for head in model.heads}


def _extent(model: Darknet, file: WeightsFile) -> tuple[int | None, int | None]:
    """The class count of a whole file, else None, and the last layer of a cut one, else None.

    They follow from the number of values. Raises ModelError if none fits.
    """
    count, heads = len(file.values), head_layers(model)
    ends: dict[int, int] = {}  # by layer: how many values a file cut after it holds
    needed = of_heads = 0
    for own in weight_tensors(model):
        needed += own.tensor.numel()
        of_heads += own.tensor.numel() if own.layer in heads else 0
        ends[own.layer] = needed
    if not file.extra_bytes:
        if count == needed:
            return model.num_classes, None
        cuts = [layer for layer, end in ends.items() if end == count]
        extra_classes, rest = divmod(count - needed, of_heads // (5 + model.num_classes))
        num_classes = model.num_classes + extra_classes if rest == 0 and model.num_classes + extra_classes > 0 else None
        if cuts and num_classes is not None:
            raise ModelError(
                f"{file.path} holds {file.describe()}: that fits a whole file for {plural(num_classes, 'class')}"
                f" as well as one for {model.num_classes} cut after layer {cuts[0]}. fix: for the whole file build"
                f" the model for {num_classes}, otherwise cut the file after another layer"
            )
        if cuts or num_classes is not None:
            return num_classes, (cuts[0] if cuts else None)
    nearest = min(ends, key=lambda layer: abs(ends[layer] - count))
    cut = "" if ends[nearest] == needed else f"; a file cut after layer {nearest} has {ends[nearest]:,}"
    raise ModelError(
        f"{file.path} holds {file.describe()}, this network with {plural(model.num_classes, 'class')} and width"
        f" {model.width:g} needs {needed:,}{cut}. fix: set model.cfg and model.width as when the file was made, or"
        " download it again"
    )
