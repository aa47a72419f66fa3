"""From the sections of a .cfg to layers with known sources, channels and strides.

There is one function for each kind of section. Every layer must divide rows and columns exactly by
its own stride. So the stride of a map (image pixels per cell, as a Fraction because a map may be
larger than the image) follows, and maps that meet fit for images of any size.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from torch import nn

from models import layers
from models.cfg import Cfg, Section
from models.heads import Head, read_head, read_raw_parts

IMAGES = -1  # the source index that means the network's input
# Far above every published network. More is a mistake, refused before memory is allocated.
MAX_VALUES = 350_000_000  # of all kernels, 1.4 GB: more than yolov4-p7, the largest, has
MAX_VALUES_PER_PIXEL = 2048  # of a map, for each pixel of the image; published networks have up to 64
MAX_STRIDE = 1024  # of which image sides must be multiples; published networks have up to 128
MAX_WINDOW = 128  # rows of a kernel or pool; published networks have up to 16
CHANNEL_STEP = 8  # scaled filter counts are multiples of this
# Added to the variance, unless [net] has bn_eps, a key that Darknet does not have. It is that of
# OpenCV's importer, which the layers are compared with. AlexeyAB's Darknet adds 1e-5, the older one
# 1e-6 to the deviation: logits of yolo-fastest differ by at most .014, and checkpoints would, too.
BN_EPS = 1e-6
BN_MOMENTUM = 0.03  # share of a batch in the running statistics


@dataclass(frozen=True)
class Shape:
    """The size of a map, as far as it does not depend on the image."""

    channels: int
    stride: Fraction | None  # in image pixels; None: one row and one column for any image

    def scaled(self, channels: int, factor: Fraction | int) -> "Shape":
        """The shape after a layer with `channels` outputs and a stride of `factor`."""
        return Shape(channels, None if self.stride is None else self.stride * factor)

    def size(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of the map for an image of (height, width) pixels."""
        if self.stride is None:
            return 1, 1
        return int(image_size[0] / self.stride), int(image_size[1] / self.stride)

    def __str__(self) -> str:
        return "1x1" if self.stride is None else f"stride {self.stride}"


class Node(NamedTuple):
    """One layer of the network: its module, the layers it reads, and the shape of its map."""

    module: nn.Module
    sources: tuple[int, ...]
    shape: Shape


class Graph:
    """The nodes and heads of a .cfg. Raises ModelError with file and line for an invalid one."""

    def __init__(self, cfg: Cfg, num_classes: int | None, width: float) -> None:
        self.num_classes = num_classes
        self.width = width
        channels = cfg.net.integer("channels", 3, minimum=1, maximum=MAX_VALUES_PER_PIXEL)
        self.shapes = {IMAGES: Shape(channels, Fraction(1))}
        self.bn_eps = cfg.net.number("bn_eps", BN_EPS, minimum=1e-9, maximum=1)
        self.max_stride = 1  # image rows and columns must be multiples of this
        self.nodes: list[Node] = []
        self.heads: list[Head] = []
        self.last_readers: dict[int, int] = {}  # by layer: the last layer that reads its map
        self.num_values = 0  # of kernels
        self.windows: dict[int, tuple[int, int]] = {}  # source and size, by centred maxpool of stride 1
        self.notes: list[str] = []  # see Darknet
        self.raw_parts = read_raw_parts(cfg.layers)
        strides = "check the strides"
        for index, section in enumerate(cfg.layers):
            node = BUILDERS[section.kind](self, section)
            for source in node.sources:
                if source != IMAGES and isinstance(self.nodes[source].module, layers.YoloMap):
                    raise section.error(f"takes its input from the [yolo] layer {source}", fix="put [route] between")
                self.last_readers[source] = index
            if not isinstance(node.module, layers.YoloMap):
                self.last_readers[index] = index
            channels = node.shape.channels
            stride = node.shape.stride
            if stride is not None:
                if channels > MAX_VALUES_PER_PIXEL * stride**2:
                    raise section.error(f"makes a map of {channels:,} channels at {node.shape}", fix=strides)
                self.max_stride = math.lcm(self.max_stride, stride.numerator)
            if self.max_stride > MAX_STRIDE:
                raise section.error(f"needs images in multiples of {self.max_stride:,} pixels", fix=strides)
            self.shapes[index] = node.shape
            self.nodes.append(node)
        if not self.heads:
            raise cfg.net.error("is not followed by any [yolo], so this is not a detector", fix="use another .cfg")
        leads_on = {head.layer for head in self.heads}
        shared = []
        for index, node in reversed(list(enumerate(self.nodes))):
            if index in leads_on:
                leads_on.update(node.sources)
                shared.append(getattr(node.module, "source", node.module))
            elif node.module not in shared and list(node.module.parameters()):
                fix = "remove it, or add a [route]"
                raise cfg.layers[index].error("leads to no [yolo], so it cannot learn", fix=fix)

    def previous(self) -> tuple[int, Shape]:
        """The layer before the one being built (IMAGES for the first) and the shape of its map."""
        source = len(self.nodes) - 1
        return source, self.shapes[source]

    def resolve(self, section: Section, key: str, reference: int) -> int:
        """The layer with the number `reference`, counted backwards from here if negative."""
        before = len(self.nodes)
        source = reference if reference >= 0 else before + reference
        if not 0 <= source < before:
            raise section.error(f"{key} refers to layer {reference}, not one of the {before} before it", key)
        return source

    def check_same_size(self, section: Section, sources: Sequence[int]) -> None:
        """Raise ModelError if the maps of the sources differ in size."""
        first = self.shapes[sources[0]]
        for source in sources[1:]:
            other = self.shapes[source]
            if other.stride != first.stride:
                two = f"layer {sources[0]} at {first}, layer {source} at {other}"
                raise section.error(f"joins maps of different sizes: {two}", fix="use sources of equal stride")


def check_grid(section: Section, shape: Shape, size: int, stride: int, padding: int) -> None:
    """Raise ModelError if windows do not divide the map exactly by their stride.

    They do if (rows + padding - size) // stride + 1 = rows / stride; padding: rows on both sides.
    """
    if not -stride <= padding - size < 0 or (shape.stride is None and stride > 1):
        window = f"with size {size}, stride {stride} and {padding} padded rows"
        problem = f"{window} does not divide a map at {shape} by {stride}"
        fix = "use an odd size and pad=1 in a convolution, no padding in a maxpool"
        raise section.error(problem, fix=f"{fix}, or stride=1 after an [avgpool]")


def convolutional(graph: Graph, section: Section) -> Node:
    """[convolutional]: a convolution with its own weights, or with those of share_index."""
    source, shape = graph.previous()
    declared = filters = section.integer("filters", 1, minimum=1)
    yolo = None  # the section that reads these filters as a raw map
    if len(graph.nodes) in graph.raw_parts:
        yolo, part = graph.raw_parts[len(graph.nodes)]
        if graph.num_classes is not None or "box_bins" in yolo.options:
            filters = part.filters(graph.num_classes or yolo.integer("classes", 20))
    elif graph.width != 1:
        filters = max(CHANNEL_STEP, round(declared * graph.width / CHANNEL_STEP) * CHANNEL_STEP)
    groups = section.integer("groups", 1, minimum=1)
    if groups == declared > 1:
        groups = filters  # depthwise convolutions stay depthwise at any width
    if shape.channels % groups or filters % groups:
        what = f"the {shape.channels} input channels and the {filters} filters"
        raise section.error(f"groups={groups} must divide {what}", "groups")
    size = section.integer("size", 1, minimum=1, maximum=MAX_WINDOW)
    stride = section.integer("stride", 1, minimum=1)
    dilation = section.integer("dilation", 1, minimum=1, maximum=MAX_WINDOW) if size > 1 else 1
    padding = dilation * (size // 2 if section.flag("pad") else section.integer("padding", 0, minimum=0))
    check_grid(section, shape, dilation * (size - 1) + 1, stride, 2 * padding)
    activation = _activation(graph, section, yolo)
    has_norm = section.flag("batch_normalize")
    is_binary = section.flag("xnor")
    is_shared = "share_index" in section.options
    if is_binary and (groups > 1 or is_shared):
        raise section.error("has xnor together with groups or share_index", "xnor", fix="drop one of them")
    node_shape = shape.scaled(filters, stride)
    in_group = shape.channels // groups
    if is_shared:
        owner = _shared_owner(graph, section, (filters, in_group, size, size, groups, has_norm))
        shared = layers.SharedConvolution(owner, stride, padding, dilation, activation)
        return Node(shared, (source,), node_shape)
    graph.num_values += filters * in_group * size * size
    if graph.num_values > MAX_VALUES:
        raise section.error(f"brings the network to {graph.num_values:,} values", fix="check its filters and size")
    conv = nn.Conv2d(shape.channels, filters, size, stride, padding, dilation, groups, bias=not has_norm)
    norm = nn.BatchNorm2d(filters, graph.bn_eps, BN_MOMENTUM) if has_norm else None
    return Node(layers.Convolution(conv, norm, activation, is_binary), (source,), node_shape)


def _activation(graph: Graph, section: Section, yolo: Section | None) -> str:
    """The activation's name: linear instead of logistic before a [yolo] with new_coords.

    Raw maps are logits: the loss needs them, and the decoding applies the logistic.
    """
    activation = section.choice("activation", "logistic", layers.ACTIVATIONS)  # Darknet's default
    if yolo is None or not yolo.flag("new_coords"):
        return activation
    if activation == "linear":  # in files of programs whose decoding applies the logistic
        note = section.error("is linear before a [yolo] with new_coords=1, read as logistic", "activation")
        graph.notes.append(str(note))
    elif activation != "logistic":
        raise section.error("needs activation=logistic before a [yolo] with new_coords=1", "activation")
    return "linear"


def _shared_owner(graph: Graph, section: Section, needed: tuple[int, ...]) -> layers.Convolution:
    """The convolution of share_index; ModelError if its shape, groups, norm are not ``needed``."""
    key = "share_index"
    index = graph.resolve(section, key, section.integer(key))
    module = graph.nodes[index].module
    owner = getattr(module, "source", module)
    if isinstance(owner, layers.Convolution):
        has = (*owner.conv.weight.shape, owner.conv.groups, owner.norm is not None)
        if has == needed:
            return owner
    raise section.error(f"share_index names layer {index}, not a convolution of the same shapes", key)


def shortcut(graph: Graph, section: Section) -> Node:
    """[shortcut]: the previous map plus those of `from`."""
    source, shape = graph.previous()
    sources = [source, *(graph.resolve(section, "from", index) for index in section.values("from", int))]
    graph.check_same_size(section, sources)
    activation = section.choice("activation", "linear", layers.ACTIVATIONS)
    return Node(layers.Shortcut(activation), tuple(sources), shape)


def route(graph: Graph, section: Section) -> Node:
    """[route]: the maps of `layers`, or one group of their channels, concatenated."""
    groups = section.integer("groups", 1, minimum=1)
    group = section.integer("group_id", 0, minimum=0, maximum=groups - 1)
    sources = []
    channels = 0
    for reference in section.values("layers", int):
        source = graph.resolve(section, "layers", reference)
        sources.append(source)
        of_source = graph.shapes[source].channels
        channels += of_source
        if of_source % groups:
            raise section.error(f"groups={groups} must divide the {of_source} channels of layer {source}", "groups")
    graph.check_same_size(section, sources)
    shape = graph.shapes[sources[0]].scaled(channels // groups, 1)
    return Node(layers.Route(groups, group), tuple(sources), shape)


def product(graph: Graph, section: Section) -> Node:
    """[sam], [scale_channels]: the map of `from` times the previous one (same size or 1x1)."""
    source, factors = graph.previous()
    other = graph.resolve(section, "from", section.integer("from"))
    shape = graph.shapes[other]
    if factors.channels != shape.channels:
        raise section.error(f"multiplies maps of {factors.channels} and {shape.channels} channels", "from")
    if section.kind == "sam" or factors.stride is not None:
        graph.check_same_size(section, (source, other))
    activation = section.choice("activation", "linear", layers.ACTIVATIONS)
    return Node(layers.Product(activation), (source, other), shape)


def maxpool(graph: Graph, section: Section) -> Node:
    """[maxpool]: the maximum of each channel over windows."""
    source, shape = graph.previous()
    stride = section.integer("stride", 1, minimum=1)
    size = section.integer("size", stride, minimum=1, maximum=MAX_WINDOW)
    padding = section.integer("padding", size - 1, minimum=0)
    check_grid(section, shape, size, stride, padding)
    if stride == 1 and size % 2 and padding == size - 1:
        source, size, padding = _cascaded(graph, source, size)
    return Node(layers.MaxPool(size, stride, padding), (source,), shape.scaled(shape.channels, stride))


def _cascaded(graph: Graph, source: int, size: int) -> tuple[int, int, int]:
    """Source, size and padding of a maxpool that goes on from a smaller one of the same map.

    A maximum over 5x5 maxima over 5x5 is that over 9x9, which takes three times as long.
    """
    while source != IMAGES:
        node = graph.nodes[source]
        if not isinstance(node.module, layers.Route) or node.module.groups > 1 or len(node.sources) > 1:
            break
        source = node.sources[0]
    graph.windows[len(graph.nodes)] = source, size
    smaller = [(its, layer) for layer, (of, its) in graph.windows.items() if of == source and its < size]
    before, layer = max(smaller, default=(1, source))
    return layer, size - before + 1, size - before


def avgpool(graph: Graph, section: Section) -> Node:
    """[avgpool]: the mean of each channel over the whole map."""
    source, shape = graph.previous()
    return Node(nn.AdaptiveAvgPool2d(1), (source,), Shape(shape.channels, None))


def upsample(graph: Graph, section: Section) -> Node:
    """[upsample]: every pixel, repeated `stride` times in both directions."""
    source, shape = graph.previous()
    stride = section.integer("stride", 2, minimum=1)
    if shape.stride is None:
        raise section.error("enlarges a map of one pixel", fix="remove it, or the [avgpool] before it")
    enlarged = shape.scaled(shape.channels, Fraction(1, stride))
    return Node(nn.Upsample(scale_factor=stride), (source,), enlarged)


def reorg(graph: Graph, section: Section) -> Node:
    """[reorg3d]: each block of pixels becomes one pixel."""
    source, shape = graph.previous()
    stride = section.integer("stride", 1, minimum=1)
    check_grid(section, shape, stride, stride, 0)
    return Node(layers.Reorg(stride), (source,), shape.scaled(shape.channels * stride**2, stride))


def dropout(graph: Graph, section: Section) -> Node:
    """[dropout]: single values dropped in training."""
    source, shape = graph.previous()
    return Node(layers.Dropout(section.number("probability", 0.2, minimum=0, maximum=1)), (source,), shape)


def yolo(graph: Graph, section: Section) -> Node:
    """[yolo]: a raw map and its head."""
    source, shape = graph.previous()
    parts = []
    for reader, part in graph.raw_parts.values():
        if reader is section and isinstance(graph.nodes[part.layer].module, layers.Convolution):
            parts.append(part)
    if shape.stride is None or shape.stride.denominator != 1:
        raise section.error(f"reads a map of {shape}, but needs a stride of whole pixels")
    num_classes = graph.num_classes or section.integer("classes", 20, minimum=1)  # 20 is Darknet's default
    for other in graph.heads[:1]:
        if other.num_classes != num_classes:
            message = f"has classes={num_classes}, but the [yolo] layer {other.layer} has {other.num_classes}"
            raise section.error(message, "classes", fix="give both the same")
    head = read_head(section, len(graph.nodes), shape.stride.numerator, num_classes, tuple(parts))
    if head.box_bins == 1 or (head.box_bins and len(parts) == 1):
        what = "box_bins must be 0, or 2 and more where the [yolo] reads a [route] of boxes and classes"
        raise section.error(what, "box_bins", fix="model.box_bins=0, or decoupled heads")
    if len(parts) > 1 and len(head.anchors) != 1:
        raise section.error("reads a [route] of boxes and classes, so it has one anchor only", "mask", fix="mask=0")
    channels = 0
    for part in parts:
        has = graph.shapes[part.layer].channels
        needed = part.filters(num_classes)
        channels += needed
        if has != needed:
            needs = f"with {len(head.anchors)} anchors and {num_classes} classes needs filters={needed}"
            fix = "correct one of them, or set the class count of the model"
            raise section.error(f"{needs} in layer {part.layer}, which has {has}", fix=fix)
    if shape.channels != channels:
        such = "a [convolutional] layer that does not share the weights of another"
        raise section.error(f"must follow {such}, or a [route] of two such without groups")
    if len(section.values("anchors", float)) % 2:
        message = "has an odd number of anchor values, a comma may be missing; the last pair is {:g},{:g}"
        graph.notes.append(str(section.error(message.format(*head.all_anchors[-1]), "anchors")))
    graph.heads.append(head)
    return Node(layers.YoloMap(len(head.anchors)), (source,), shape)


BUILDERS: dict[str, Callable[[Graph, Section], Node]] = {
    "convolutional": convolutional,
    "shortcut": shortcut,
    "route": route,
    "sam": product,
    "scale_channels": product,
    "maxpool": maxpool,
    "avgpool": avgpool,
    "upsample": upsample,
    "reorg3d": reorg,
    "dropout": dropout,
    "yolo": yolo,
}
