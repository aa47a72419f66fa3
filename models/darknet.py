"""A Darknet network as a torch module: images in, one raw map per [yolo] section out."""

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from models.cfg import Cfg, Section, load_cfg, with_options
from models.errors import ModelError
from models.graph import IMAGES, Graph, Node, Shape
from models.heads import Head
from models.layers import Convolution, SharedConvolution, YoloMap
from models.sections import build_graph


class Darknet(nn.Module):
    """The network of a .cfg.

    Args:
        cfg: path of a .cfg file, or one already parsed.
        num_classes: class count of the [yolo] sections and the convolutions before them; None keeps
            that of the file.
        width: factor for the filters of all other convolutions (multiples of 8); 1 keeps them.

    Attributes:
        layers: the modules in file order, so that an index is a Darknet layer index.
        heads: one Head for each [yolo] section, in the order of the raw maps.
        shapes, sources: for every layer its map's channels and strides, and the layers it reads.
        num_frozen: how many layers, from the first, are not trained.
        max_stride: image rows and columns must be multiples of this.
        in_channels: channels of an image.
        notes: oddities of the .cfg that the user should know about, one sentence each.
        seen, weights_version: the header of a .weights file: how many images the weights were
            trained on, and (major, minor, revision).

    Raises ModelError, naming file and line, for an invalid .cfg.
    """

    def __init__(self, cfg: str | Path | Cfg, num_classes: int | None = None, width: float = 1.0) -> None:
        super().__init__()
        if num_classes is not None and num_classes < 1:
            raise ModelError(f"the number of classes must be 1 or more, got {num_classes}")
        if not 0 < width < math.inf:
            raise ModelError(f"model.width must be above 0, got {width}")
        self.cfg = cfg if isinstance(cfg, Cfg) else load_cfg(cfg)
        graph = _build(self.cfg, num_classes, width)
        nodes = graph.nodes
        self.layers = nn.ModuleList(node.module for node in nodes)
        self.heads: list[Head] = graph.heads
        self.notes: list[str] = graph.notes
        self.shapes: list[Shape] = [node.shape for node in nodes]
        self.sources: list[tuple[int, ...]] = [node.sources for node in nodes]
        self.num_classes = self.heads[0].num_classes
        self.width = width
        self.max_stride = graph.max_stride
        self.in_channels = graph.image.channels
        self.seen = 0
        self.weights_version = (0, 2, 5)  # what Darknet writes today
        self.num_frozen = 0
        self._released = _releases(nodes)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Raw maps (batch, anchors, rows, columns, 5 + classes), one per head in file order.

        images: float (batch, in_channels, height, width), RGB in 0..1; height and width multiples
        of max_stride. They become float64 if the weights are. The last dimension of a map is x, y,
        w, h, objectness, classes, all before any activation.
        """
        self._check_size(images.shape[-3], images.shape[-2], images.shape[-1])
        if self.head_convolution(self.heads[0]).conv.weight.dtype == torch.float64:
            images = images.double()
        maps: dict[int, Tensor] = {IMAGES: images}
        for index, layer in enumerate(self.layers):
            maps[index] = layer(*[maps[source] for source in self.sources[index]])
            for source in self._released[index]:
                del maps[source]
        return [maps[head.layer] for head in self.heads]

    def _check_size(self, channels: int, height: int, width: int) -> None:
        if channels != self.in_channels:
            raise ModelError(
                f"{self.cfg.source} is for images of {self.in_channels} channels, these have {channels}."
                f" fix: channels={channels} in its [net] section"
            )
        step = self.max_stride
        if height % step or width % step or not height or not width:
            rows, columns = self.nearest_size(height, width)
            raise ModelError(
                f"image size {height}x{width} is not a multiple of the network's stride {step}."
                f" fix: the nearest is {rows}x{columns}"
            )

    def nearest_size(self, height: int, width: int) -> tuple[int, int]:
        """The (height, width) of images, in pixels, nearest to these that the network accepts."""
        step = self.max_stride
        return max(step, round(height / step) * step), max(step, round(width / step) * step)

    def train(self, mode: bool = True) -> "Darknet":
        """Switch the mode. Frozen layers stay in evaluation, so their statistics do not move."""
        super().train(mode)
        for layer in self.layers[: self.num_frozen]:
            layer.eval()
        return self

    def freeze(self, first_n_layers: int) -> None:
        """Freeze the parameters and batch norm statistics of layers 0 .. first_n_layers - 1.

        0 releases all. Raises ModelError if that is out of range or leaves nothing to train.
        """
        if not 0 <= first_n_layers <= len(self.layers):
            raise ModelError(f"model.freeze must be between 0 and {len(self.layers)} layers, got {first_n_layers}")
        if first_n_layers > max(head.layer for head in self.heads) - 1:
            raise ModelError(f"model.freeze={first_n_layers} leaves nothing to train. fix: freeze fewer layers")
        self.num_frozen = first_n_layers
        for index, layer in enumerate(self.layers):
            layer.requires_grad_(index >= first_n_layers)
        self.train(self.training)

    @torch.no_grad()
    def init_head_biases(self) -> None:
        """Start untrained heads with a realistic prior: few objects, all classes equally likely.

        Otherwise the first epochs only unlearn false objects, since sigmoids start at 0.5. The
        offsets are those of the published YOLOv3-SPP recipe: -4.5 for objectness, log(0.6 /
        (classes - 0.99)) for every class.
        """
        for head in self.heads:
            convolution = self.head_convolution(head)
            bias = convolution.conv.bias if convolution.norm is None else convolution.norm.bias
            assert bias is not None
            per_anchor = bias.view(len(head.anchors), 5 + head.num_classes)
            per_anchor[:, 4] -= 4.5
            per_anchor[:, 5:] += math.log(0.6 / (head.num_classes - 0.99))

    def head_convolution(self, head: Head) -> Convolution:
        """The convolution that makes the raw map of `head`."""
        layer = self.layers[head.layer - 1]
        assert isinstance(layer, Convolution)  # the graph admits nothing else before a [yolo]
        return layer


def count_parameters(model: nn.Module) -> int:
    """Number of trained values. Batch norm statistics do not count."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_flops(model: Darknet, image_size: tuple[int, int]) -> int:
    """Operations for one (height, width) image: 2 per multiply-add of a convolution."""
    flops = 0
    for layer, shape in zip(model.layers, model.shapes, strict=True):
        convolution = layer.source if isinstance(layer, SharedConvolution) else layer
        if isinstance(convolution, Convolution):
            rows, columns = shape.size(image_size)
            flops += 2 * convolution.conv.weight.numel() * rows * columns
    return flops


def fitted_cfg(model: Darknet) -> str:
    """The text of `model.cfg` with the filters, groups and classes of the built model.

    Darknet reads it together with the file that save_darknet_weights writes.
    """
    changes = (
        (section, key, str(value))
        for section, layer in zip(model.cfg.layers, model.layers, strict=True)
        for key, value in _own_values(section, layer, model.num_classes).items()
        if section.integer(key, -1) != value
    )
    return with_options(model.cfg.text, changes)


def _own_values(section: Section, layer: object, num_classes: int) -> dict[str, int]:
    """The values of the built layer for the options that class count and width affect."""
    if section.kind == "yolo":
        return {"classes": num_classes}
    if isinstance(layer, SharedConvolution):
        layer = layer.source
    if isinstance(layer, Convolution):
        values = {"filters": layer.conv.out_channels}
        return values | {"groups": layer.conv.groups} if "groups" in section.options else values
    return {}


def _build(cfg: Cfg, num_classes: int | None, width: float) -> Graph:
    """The graph of a .cfg. The ModelError names model.width if the .cfg works without it."""
    try:
        return build_graph(cfg, num_classes, width)
    except ModelError as error:
        if width == 1:
            raise
        with torch.device("meta"):  # shapes only
            build_graph(cfg, num_classes, width=1.0)
        raise ModelError(f"model.width={width:g} does not suit this .cfg ({error}). fix: model.width=1") from error


def _releases(nodes: list[Node]) -> list[list[int]]:
    """For every layer the maps that no later layer reads, whose memory can then be freed."""
    last_reader = {source: index for index, node in enumerate(nodes) for source in node.sources}
    released = []
    for index, node in enumerate(nodes):
        done = [source for source in dict.fromkeys(node.sources) if last_reader[source] == index]
        unread = index not in last_reader and not isinstance(node.module, YoloMap)
        released.append([*done, index] if unread else done)
    return released
