"""From the sections of a .cfg to layers with known sources, channels and strides.

The stride of a map (image pixels per cell, as a Fraction because a map may be larger than the
image) follows from the layers before it. For that, every layer must divide rows and columns exactly
by its own stride. This is checked here, so maps that meet in a route or shortcut fit for any image.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from torch import nn

from models.cfg import Cfg, Section
from models.heads import Head
from models.layers import YoloMap

IMAGES = -1  # the source index that means the network's input
# Far above every published network. More is a mistake, refused before memory is allocated.
MAX_VALUES = 350_000_000  # stored values, 1.4 GB: more than yolov4-p7, the largest, has
MAX_CHANNELS = 100_000
MAX_VALUES_PER_PIXEL = 2048  # of one map, for each pixel of the image; published networks have up to 64
MAX_STRIDE = 1024  # images are at least this large; published networks have up to 128

Stride = tuple[Fraction, Fraction]  # pixels per (row, column)


@dataclass(frozen=True)
class Shape:
    """The channels of a map and its stride in image pixels, known before any image.

    stride None: the map has one row and one column for any image.
    """

    channels: int
    stride: Stride | None

    def scaled(self, channels: int, factor: Fraction | int | tuple[int, int]) -> "Shape":
        """The shape after a layer with `channels` outputs and a stride of `factor`."""
        rows, columns = factor if isinstance(factor, tuple) else (factor, factor)
        stride = None if self.stride is None else (self.stride[0] * rows, self.stride[1] * columns)
        return Shape(channels, stride)

    def size(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of the map for an image of (height, width) pixels."""
        if self.stride is None:
            return 1, 1
        return int(image_size[0] / self.stride[0]), int(image_size[1] / self.stride[1])

    def __str__(self) -> str:
        if self.stride is None:
            return "1x1"
        rows, columns = self.stride
        return f"stride {rows}" if rows == columns else f"strides {rows} and {columns}"


@dataclass(frozen=True)
class Node:
    """One layer of the network: its module, the layers it reads, and the shape of its map."""

    module: nn.Module
    sources: tuple[int, ...]
    shape: Shape


class Graph:
    """The nodes and heads of a .cfg built so far. sections.py adds one layer after another."""

    def __init__(self, cfg: Cfg, num_classes: int | None, width: float) -> None:
        self.cfg = cfg
        self.num_classes = num_classes
        self.width = width
        channels = cfg.net.integer("channels", 3, minimum=1, maximum=MAX_VALUES_PER_PIXEL)
        self.image = Shape(channels, (Fraction(1), Fraction(1)))
        self.max_stride = 1  # image rows and columns must be multiples of this
        self.nodes: list[Node] = []
        self.heads: list[Head] = []
        self.num_values = 0
        self.notes: list[str] = []  # as Darknet.notes, with file and line

    def add(self, section: Section, node: Node) -> None:
        """Append a layer. Raises ModelError if its map or the image it needs would be too large."""
        channels, stride = node.shape.channels, node.shape.stride
        if channels > MAX_CHANNELS:
            raise section.error(f"makes a map of {channels:,} channels, more than {MAX_CHANNELS:,}")
        if stride is not None:
            if channels > MAX_VALUES_PER_PIXEL * stride[0] * stride[1]:
                raise section.error(
                    f"makes a map of {channels:,} channels at {node.shape}, more than {MAX_VALUES_PER_PIXEL:,} values"
                    " for each pixel of the image. fix: check its size and the strides before it"
                )
            self.max_stride = math.lcm(self.max_stride, stride[0].numerator, stride[1].numerator)
        if self.max_stride > MAX_STRIDE:
            raise section.error(
                f"would need images whose sides are multiples of {self.max_stride:,} pixels, more than {MAX_STRIDE:,}."
                " fix: check its stride and those before it"
            )
        self.nodes.append(node)

    def note(self, section: Section, sentence: str, key: str) -> None:
        """Keep a sentence for the user, with the file and the line of `key`."""
        self.notes.append(str(section.error(sentence, key)))

    def previous(self, section: Section) -> tuple[int, Shape]:
        """The layer before the one being built (IMAGES for the first) and the shape of its map."""
        if not self.nodes:
            return IMAGES, self.image
        source = self._checked(section, len(self.nodes) - 1, key=None)
        return source, self.nodes[source].shape

    def resolve(self, section: Section, key: str, reference: int) -> int:
        """The layer that `reference` names, counted backwards from here if it is negative."""
        source = reference if reference >= 0 else len(self.nodes) + reference
        if not 0 <= source < len(self.nodes):
            raise section.error(
                f"{key} refers to layer {reference}, but this is layer {len(self.nodes)}: only earlier ones exist", key
            )
        return self._checked(section, source, key)

    def shape(self, source: int) -> Shape:
        """The shape of the map of a source."""
        return self.image if source == IMAGES else self.nodes[source].shape

    def following(self) -> Section | None:
        """The section after the one being built."""
        return next(iter(self.cfg.layers[len(self.nodes) + 1 : len(self.nodes) + 2]), None)

    def check_same_size(self, section: Section, sources: tuple[int, ...]) -> None:
        """Refuse sources whose maps differ in size."""
        shapes = {source: self.shape(source) for source in sources}
        if len({shape.stride for shape in shapes.values()}) > 1:
            listed = ", ".join(f"layer {source} at {shape}" for source, shape in shapes.items())
            raise section.error(f"joins maps of different sizes: {listed}. fix: use sources of equal stride")

    def reserve(self, section: Section, num_values: int) -> None:
        """Count the values of a layer before it is allocated. Refuse an implausible total."""
        self.num_values += num_values
        if self.num_values > MAX_VALUES:
            raise section.error(
                f"brings the network to {self.num_values:,} values, more than the {MAX_VALUES:,} that are allowed."
                " fix: check its filters and size"
            )

    def _checked(self, section: Section, source: int, key: str | None) -> int:
        if isinstance(self.nodes[source].module, YoloMap):
            raise section.error(f"takes its input from the [yolo] layer {source}. fix: put a [route] before it", key)
        return source
