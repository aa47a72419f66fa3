"""From the sections of a .cfg to layers with known sources, channels and strides.

The stride of a map (input pixels per cell, as a Fraction because a map may be larger than the image) follows from
the layers it came through. That needs every layer to divide rows and columns exactly by its own stride, which is
checked here, so that maps that meet in a route or shortcut are known to fit before any image is seen.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from torch import nn

from models.cfg import Cfg, Section, nearest_name
from models.errors import ModelError
from models.layers import ACTIVATIONS, Convolution, MaxPool, Route, Shortcut, Upsample, YoloMap

IMAGES = -1  # the source index that means the network's input
CHANNEL_STEP = 8  # scaled filter counts are multiples of this


@dataclass(frozen=True)
class Head:
    """What one [yolo] section says: enough to assign targets to its raw map and to decode it.

    `layer` is the Darknet layer index, `stride` the pixels per cell, `anchors` (width, height) in pixels at network
    scale. Centres are decoded as sigmoid * scale_x_y - (scale_x_y - 1) / 2.
    """

    layer: int
    stride: int
    anchors: tuple[tuple[float, float], ...]
    num_classes: int
    scale_x_y: float = 1.0
    new_coords: bool = False


@dataclass(frozen=True)
class Node:
    """One layer's place in the network: its module, where its inputs come from and what its map looks like."""

    module: nn.Module
    sources: tuple[int, ...]
    channels: int
    stride: Fraction


class GraphBuilder:
    """Builds the nodes and heads of one .cfg in file order.

    num_classes: class count for all [yolo] sections and the convolutions in front of them; None keeps the file's.
    width: factor for the filters of all other convolutions, rounded to multiples of 8, at least 8; 1 keeps them.
    """

    def __init__(self, cfg: Cfg, num_classes: int | None, width: float, bn_eps: float, bn_momentum: float) -> None:
        self.cfg = cfg
        self.num_classes = num_classes
        self.width = width
        self.bn_eps = bn_eps
        self.bn_momentum = bn_momentum
        self.image_channels = cfg.net.integer("channels", 3, minimum=1)
        self.nodes: list[Node] = []
        self.heads: list[Head] = []

    def build(self) -> tuple[list[Node], list[Head]]:
        """All nodes and heads. Raises ModelError with file and line where the sections do not make a network."""
        builders: dict[str, Callable[[Section], Node]] = {
            "convolutional": self._convolutional,
            "shortcut": self._shortcut,
            "route": self._route,
            "upsample": self._upsample,
            "maxpool": self._maxpool,
            "yolo": self._yolo,
        }
        for section in self.cfg.layers:
            self.nodes.append(builders[section.kind](section))
        if not self.heads:
            raise ModelError(f"{self.cfg.source} has no [yolo] section, so it is no detector. fix: use another .cfg")
        if len(counts := {head.num_classes for head in self.heads}) > 1:
            raise ModelError(f"{self.cfg.source}: [yolo] sections of different classes {sorted(counts)}. fix: use one")
        return self.nodes, self.heads

    def _convolutional(self, section: Section) -> Node:
        source = self._previous(section)
        in_channels, stride_before = self._shape(source)
        declared = section.integer("filters", 1, minimum=1)
        filters = self._num_filters(section, declared)
        groups = section.integer("groups", 1, minimum=1)
        if groups == declared:
            groups = filters  # a depthwise convolution stays one at any width
        if in_channels % groups or filters % groups:
            raise section.error(
                f"groups={groups} must divide the {in_channels} input channels and the {filters} filters", "groups"
            )
        size = section.integer("size", 1, minimum=1)
        stride = section.integer("stride", 1, minimum=1)
        padding = size // 2 if section.integer("pad", 0) else section.integer("padding", 0, minimum=0)
        _check_grid(section, size, stride, total_padding=2 * padding)
        module = Convolution(
            in_channels,
            filters,
            size,
            stride,
            padding,
            groups,
            batch_norm=section.integer("batch_normalize", 0) != 0,
            activation=_activation(section, default="logistic"),  # Darknet's default, too
            bn_eps=self.bn_eps,
            bn_momentum=self.bn_momentum,
        )
        return Node(module, (source,), filters, stride_before * stride)

    def _shortcut(self, section: Section) -> Node:
        references = section.integers("from")
        if len(references) != 1:
            raise section.error("from must name one layer: sums of several are not supported yet", "from")
        sources = (self._previous(section), self._resolve(section, "from", references[0]))
        self._check_same_stride(section, sources)
        (channels, stride), (other_channels, _) = map(self._shape, sources)
        if channels != other_channels:
            raise section.error(f"adds maps of {channels} and {other_channels} channels, which must be equal", "from")
        return Node(Shortcut(_activation(section, default="linear")), sources, channels, stride)

    def _route(self, section: Section) -> Node:
        sources = tuple(self._resolve(section, "layers", reference) for reference in section.integers("layers"))
        self._check_same_stride(section, sources)
        groups = section.integer("groups", 1, minimum=1)
        group = section.integer("group_id", 0, minimum=0)
        if group >= groups:
            raise section.error(f"group_id must be below groups={groups}, got {group}", "group_id")
        channels = [self._shape(source)[0] for source in sources]
        if any(count % groups for count in channels):
            raise section.error(f"groups={groups} must divide the channels of every source, {channels}", "groups")
        return Node(Route(groups, group), sources, sum(channels) // groups, self._shape(sources[0])[1])

    def _upsample(self, section: Section) -> Node:
        source = self._previous(section)
        channels, stride_before = self._shape(source)
        stride = section.integer("stride", 2, minimum=1)
        return Node(Upsample(stride), (source,), channels, stride_before / stride)

    def _maxpool(self, section: Section) -> Node:
        source = self._previous(section)
        channels, stride_before = self._shape(source)
        stride = section.integer("stride", 1, minimum=1)
        size = section.integer("size", stride, minimum=1)
        padding = section.integer("padding", size - 1, minimum=0)
        _check_grid(section, size, stride, total_padding=padding)
        return Node(MaxPool(size, stride, padding), (source,), channels, stride_before * stride)

    def _yolo(self, section: Section) -> Node:
        source = self._previous(section)
        if source == IMAGES or not isinstance(self.nodes[source].module, Convolution):
            raise section.error("must follow a [convolutional] layer that makes its map")
        if section.integer("new_coords", 0):
            raise section.error("new_coords=1 (boxes without exp) is not supported yet", "new_coords")
        channels, stride = self._shape(source)
        if stride.denominator != 1:
            raise section.error(f"lies on a map larger than the image (stride {stride}). fix: upsample less before it")
        num_classes = self._num_classes(section)
        anchors = _masked_anchors(section)
        if channels != (needed := len(anchors) * (5 + num_classes)):
            raise section.error(
                f"with {len(anchors)} anchors and {num_classes} classes needs filters={needed} in the convolution"
                f" before it, which has {channels}. fix: correct one of them, or give the model its class count"
            )
        scale_x_y = section.number("scale_x_y", 1.0)
        if scale_x_y < 1:
            raise section.error(f"scale_x_y must be 1 or more, got {scale_x_y}", "scale_x_y")
        self.heads.append(Head(len(self.nodes), stride.numerator, anchors, num_classes, scale_x_y))
        return Node(YoloMap(len(anchors)), (source,), channels, stride)

    def _num_filters(self, section: Section, declared: int) -> int:
        """Filters of the convolution being built: retargeted in front of a [yolo] section, else scaled by width."""
        following = self.cfg.layers[len(self.nodes) + 1 : len(self.nodes) + 2]
        if following and following[0].kind == "yolo":
            if self.num_classes is None:
                return declared
            return len(_masked_anchors(following[0])) * (5 + self.num_classes)
        if self.width == 1:
            return declared
        return max(CHANNEL_STEP, round(declared * self.width / CHANNEL_STEP) * CHANNEL_STEP)

    def _num_classes(self, section: Section) -> int:
        declared = section.integer("classes", 20, minimum=1)  # 20 is Darknet's default
        return declared if self.num_classes is None else self.num_classes

    def _previous(self, section: Section) -> int:
        """The layer in front of the one being built, IMAGES for the first."""
        if not self.nodes:
            return IMAGES
        return self._checked_source(section, len(self.nodes) - 1, key=None)

    def _resolve(self, section: Section, key: str, reference: int) -> int:
        """The layer index that `reference` means: from the start of the file, or backwards if below 0."""
        source = reference if reference >= 0 else len(self.nodes) + reference
        if not 0 <= source < len(self.nodes):
            raise section.error(
                f"{key} refers to layer {reference}, but this is layer {len(self.nodes)}: only earlier ones exist", key
            )
        return self._checked_source(section, source, key)

    def _checked_source(self, section: Section, source: int, key: str | None) -> int:
        if isinstance(self.nodes[source].module, YoloMap):
            raise section.error(f"takes its input from the [yolo] layer {source}. fix: put a [route] before it", key)
        return source

    def _shape(self, source: int) -> tuple[int, Fraction]:
        """(channels, stride) of the map of a source."""
        if source == IMAGES:
            return self.image_channels, Fraction(1)
        return self.nodes[source].channels, self.nodes[source].stride

    def _check_same_stride(self, section: Section, sources: tuple[int, ...]) -> None:
        strides = {source: self._shape(source)[1] for source in sources}
        if len(set(strides.values())) > 1:
            listed = ", ".join(f"layer {source} at stride {stride}" for source, stride in strides.items())
            raise section.error(f"joins maps of different sizes: {listed}. fix: use sources of one stride")


def _check_grid(section: Section, size: int, stride: int, total_padding: int) -> None:
    """Refuse a window that does not divide the rows exactly by its stride: (rows + padding - size) // stride + 1."""
    if not -stride <= total_padding - size < 0:
        raise section.error(
            f"with size {size}, stride {stride} and {total_padding} padded rows does not divide the map by {stride}."
            " fix: use pad=1 in a convolution, or leave out padding in a maxpool"
        )


def _activation(section: Section, default: str) -> str:
    name = section.text("activation", default)
    if name not in ACTIVATIONS:
        raise section.error(f"has no activation {name}; {nearest_name(name, ACTIVATIONS)}", "activation")
    return name


def _masked_anchors(section: Section) -> tuple[tuple[float, float], ...]:
    """The anchors of a [yolo] section that its mask selects, (width, height) in pixels."""
    num = section.integer("num", 1, minimum=1)
    values = section.numbers("anchors")
    if len(values) != 2 * num:
        raise section.error(f"num={num} needs {2 * num} anchor values, got {len(values)}", "anchors")
    if min(values) <= 0:
        raise section.error(f"anchors must be above 0, got {min(values):g}", "anchors")
    pairs = list(zip(values[::2], values[1::2], strict=True))
    mask = section.integers("mask", default=list(range(num)))
    if wrong := [index for index in mask if not 0 <= index < num]:
        raise section.error(f"mask names anchor {wrong[0]}, but num={num} anchors are numbered from 0", "mask")
    return tuple(pairs[index] for index in mask)
