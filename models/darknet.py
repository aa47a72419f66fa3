"""A Darknet network as a torch module."""

import copy
import math
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from models.cfg import Cfg, ModelError, load_cfg
from models.graph import IMAGES, Graph
from models.heads import Head
from models.layers import Convolution, YoloMap

Version = tuple[int, int, int]
WEIGHTS_VERSION: Version = (0, 2, 5)  # major, minor, revision of .weights files, as Darknet writes them today


class Darknet(nn.Module):
    """The network of a .cfg.

    cfg: path of a .cfg file, or one already parsed. num_classes: class count of the [yolo] sections
    and the convolutions before them; None: that of the file. width: factor for the filters of all
    other convolutions, rounded to multiples of 8. Raises ModelError with the line of a wrong .cfg.
    """

    takes_any_size = True  # of multiples of max_stride; an exported file may take one alone

    def __init__(self, cfg: str | Path | Cfg, num_classes: int | None = None, width: float = 1.0) -> None:
        super().__init__()
        if num_classes is not None and num_classes < 1:
            raise ModelError(f"the number of classes must be 1 or more, got {num_classes}")
        self.cfg = cfg if isinstance(cfg, Cfg) else load_cfg(cfg)
        self.width = width
        graph = Graph(self.cfg, num_classes, width)
        modules, self.sources, self.shapes = zip(*graph.nodes, strict=True)  # sources: what layers read
        self.layers = nn.ModuleList(modules)  # an index is a Darknet layer index
        self.heads = graph.heads  # one for each [yolo] section, in the order of the raw maps
        self.notes = graph.notes  # oddities of the .cfg that a user should know about, one sentence each
        self.num_classes = self.heads[0].num_classes
        self.max_stride = graph.max_stride  # image rows and columns must be multiples of this
        self.bn_eps = graph.bn_eps  # what batch norm adds to the variance
        self.in_channels = graph.shapes[IMAGES].channels
        self.seen = 0  # images that the weights learnt from; with the version the header of .weights files
        self.weights_version = WEIGHTS_VERSION
        self.num_frozen = 0  # how many of the first layers are not trained
        self._released: list[list[int]] = [[] for _ in graph.nodes]  # maps to free after each layer
        for source, reader in graph.last_readers.items():
            self._released[reader].append(source)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Raw maps (batch, anchors, rows, columns, 5 + classes), one per head in file order.

        images: float (batch, in_channels, height, width), RGB in 0..1; height and width multiples
        of max_stride. They get the dtype of the weights. The last dimension of a map is x, y,
        w, h (or 4 * box_bins logits), objectness, classes, all before any activation. Raises
        ModelError for images of another size or number of channels.
        """
        channels, height, width = images.shape[-3:]
        if channels != self.in_channels:
            wanted = f"{self.cfg.source} is for images of {self.in_channels} channels, these have {channels}"
            raise ModelError(wanted, f"channels={channels} in its [net] section")
        nearest = self.nearest_size(height, width)
        if (height, width) != nearest:
            size = f"image size {height}x{width} is not a multiple of the network's stride {self.max_stride}"
            raise ModelError(size, f"the nearest is {nearest[0]}x{nearest[1]}")
        weight = self.head_convolutions(self.heads[0])[0].conv.weight
        maps = {IMAGES: images.to(weight.dtype)}
        for index, layer in enumerate(self.layers):
            maps[index] = layer(*[maps[source] for source in self.sources[index]])
            for source in self._released[index]:
                del maps[source]
        return [maps[head.layer] for head in self.heads]

    def nearest_size(self, height: int, width: int) -> tuple[int, int]:
        """The (height, width) of images, in pixels, nearest to these that the network accepts."""
        step = self.max_stride
        return max(step, round(height / step) * step), max(step, round(width / step) * step)

    def train(self, mode: bool = True) -> "Darknet":
        """Switch the mode. Frozen layers stay in evaluation, which keeps their statistics."""
        super().train(mode)
        for layer in self.layers[: self.num_frozen]:
            layer.eval()
        return self

    def freeze(self, first_n_layers: int) -> None:
        """Freeze the parameters and batch norm statistics of the first layers; 0 releases all.

        Raises ModelError if that is out of range or leaves nothing to train.
        """
        most = self.heads[-1].parts[-1].layer  # the convolution of the last head is always trained
        if not 0 <= first_n_layers <= most:
            raise ModelError(f"model.freeze must be between 0 and {most} layers, got {first_n_layers}")
        self.num_frozen = first_n_layers
        for index, layer in enumerate(self.layers):
            layer.requires_grad_(index >= first_n_layers)
        self.train(self.training)

    @torch.no_grad()
    def init_head_biases(self) -> None:
        """Give untrained heads a realistic prior: few objects, all classes equally likely.

        As YOLOv3-SPP was published: objectness -4.5, every class log(0.6 / (classes - 0.99)).
        """
        for head in self.heads:
            for part, convolution in zip(head.parts, self.head_convolutions(head), strict=True):
                bias = convolution.conv.bias if convolution.norm is None else convolution.norm.bias
                assert bias is not None
                per_anchor = bias.view(len(head.anchors), -1)
                classes_from = part.fixed // len(head.anchors)
                per_anchor[:, classes_from - 1 : classes_from] -= 4.5
                per_anchor[:, classes_from:] += math.log(0.6 / (head.num_classes - 0.99))

    def head_convolutions(self, head: Head) -> list[Convolution]:
        """The convolutions that make the raw map of `head`: one, or those of boxes and classes."""
        return [cast(Convolution, self.layers[part.layer]) for part in head.parts]  # as the graph ensures


def count_parameters(model: nn.Module) -> int:
    """Number of parameters. Batch norm statistics do not count."""
    return sum(map(Tensor.numel, model.parameters()))


def count_flops(model: Darknet, image_size: tuple[int, int]) -> int:
    """Operations for one (height, width) image: 2 per multiply-add of a convolution."""
    flops = 0
    for layer, shape in zip(model.layers, model.shapes, strict=True):
        convolution = getattr(layer, "source", layer)
        if isinstance(convolution, Convolution):
            rows, columns = shape.size(image_size)
            flops += 2 * convolution.conv.weight.numel() * rows * columns
    return flops


def fitted_cfg(model: Darknet) -> str:
    """The text of `model.cfg` with the filters, groups and classes of the model, for Darknet."""
    changes = []
    for section, layer in zip(model.cfg.layers, model.layers, strict=True):
        convolution = getattr(layer, "source", layer)
        values: dict[str, object] = {}
        if isinstance(layer, YoloMap):
            values["classes"] = model.num_classes
        if section.options.get("activation") == "silu":
            values["activation"] = "swish"
        if isinstance(convolution, Convolution):
            values["filters"] = convolution.conv.out_channels
            if "groups" in section.options:
                values["groups"] = convolution.conv.groups
        for key, value in values.items():
            if section.options.get(key) != str(value):
                changes.append((section, key, value))
    return model.cfg.with_options(changes).text


def cfg_with_anchors_of(model: Darknet, other: Darknet) -> Cfg:
    """``model.cfg`` with the anchors of ``other``; unchanged if their classes or numbers differ."""
    changes = []
    if len(model.heads) != len(other.heads) or model.num_classes != other.num_classes:
        return model.cfg
    for ours, theirs in zip(model.heads, other.heads, strict=True):
        if len(ours.anchors) != len(theirs.anchors):
            return model.cfg
        if ours.all_anchors != theirs.all_anchors:
            section = model.cfg.layers[ours.layer]
            source = other.cfg.layers[theirs.layer]
            changes += [(section, key, source.text(key, 1)) for key in ("anchors", "num")]
    return model.cfg.with_options(changes)


def for_detection(model: Darknet, device: torch.device) -> Darknet:
    """``model`` in the form that detects fastest on its device, in channels_last memory.

    On a GPU it is a copy with batch norm folded into the convolutions; on a CPU it is the model
    itself, whose metrics stay equal to the bit.
    """
    fastest = model if device.type == "cpu" else fuse_batch_norm(model)
    return fastest.to(memory_format=torch.channels_last)


@torch.no_grad()
def fuse_batch_norm(model: Darknet) -> Darknet:
    """A copy for evaluation, with batch norm folded, in float64, into all but xnor convolutions."""
    fused = copy.deepcopy(model).eval()
    for layer in fused.layers:
        if isinstance(layer, Convolution) and layer.norm is not None and not layer.xnor:
            dtype = layer.conv.weight.dtype
            layer.conv = nn.utils.fuse_conv_bn_eval(layer.conv.double(), layer.norm.double()).to(dtype)
            layer.norm = None
    return fused
