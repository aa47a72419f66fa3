"""Build the layer of a [convolutional] section."""

from torch import nn

from models.cfg.parse import Section
from models.network.graph import Graph, Node
from models.network.heads import read_anchors
from models.network.layers import Convolution, SharedConvolution
from models.network.pools import Blur
from models.network.section_options import check_grid, read_activation, read_blur, read_strides

CHANNEL_STEP = 8  # scaled filter counts are multiples of this
BN_EPS = 1e-6  # added to the variance, as in Darknet
BN_MOMENTUM = 0.03  # share of a batch in the running statistics


def convolutional(graph: Graph, section: Section) -> Node:
    """[convolutional]: a convolution with its own weights, or with those of share_index."""
    source, shape = graph.previous(section)
    declared = section.integer("filters", 1, minimum=1)
    filters = _num_filters(graph, declared)
    xnor = section.integer("xnor", 0) != 0
    groups = section.integer("groups", 1, minimum=1)
    if xnor and groups > 1:
        graph.note(section, "has groups, which xnor=1 disables, as in Darknet", "groups")
        groups = 1
    if groups == declared > 1:
        groups = filters  # depthwise convolutions stay depthwise at any width
    if shape.channels % groups or filters % groups:
        raise section.error(
            f"groups={groups} must divide the {shape.channels} input channels and the {filters} filters", "groups"
        )
    size = section.integer("size", 1, minimum=1)
    stride = read_strides(section)
    dilation = section.integer("dilation", 1, minimum=1) if size > 1 else 1
    padding = size // 2 if section.integer("pad", 0) else section.integer("padding", 0, minimum=0)
    blur = read_blur(section, stride)
    check_grid(section, shape, dilation * (size - 1) + 1, stride, 2 * padding * dilation, blurred=blur is not None)
    activation = _activation(graph, section)
    node_shape = shape.scaled(filters, stride)
    batch_norm = _has_batch_norm(section)
    if "share_index" in section.options:
        if xnor or blur is not None:
            raise section.error(
                "has share_index together with xnor or antialiasing, which is not supported. fix: drop one of them",
                "share_index",
            )
        owner = _shared_owner(graph, section, (shape.channels, filters, size, groups))
        shared = SharedConvolution(owner, stride, padding * dilation, dilation, activation)
        return Node(shared, (source,), node_shape)
    graph.reserve(section, filters * (shape.channels // groups * size * size + (4 if batch_norm else 1)))
    step = stride if blur is None else (1, 1)
    conv = nn.Conv2d(shape.channels, filters, size, step, padding * dilation, dilation, groups, bias=not batch_norm)
    norm = nn.BatchNorm2d(filters, BN_EPS, BN_MOMENTUM) if batch_norm else None
    low_pass = None if blur is None else Blur(blur, stride)
    return Node(Convolution(conv, norm, activation, low_pass, xnor), (source,), node_shape)


def _num_filters(graph: Graph, declared: int) -> int:
    """Filters of this convolution: set by the class count before a [yolo], else scaled."""
    following = graph.following()
    if following is not None and following.kind == "yolo":
        if graph.num_classes is None:
            return declared
        return len(read_anchors(following)[1]) * (5 + graph.num_classes)
    if graph.width == 1:
        return declared
    return max(CHANNEL_STEP, round(declared * graph.width / CHANNEL_STEP) * CHANNEL_STEP)


def _has_batch_norm(section: Section) -> bool:
    """Whether it has batch norm. Only in Darknet's training cbn differs from batch_normalize."""
    return section.integer("batch_normalize", 0) != 0 or section.integer("cbn", 0) != 0


def _activation(graph: Graph, section: Section) -> str:
    """The activation's name: linear before a [yolo] with new_coords.

    Raw maps are logits: the loss needs them, and the decoding applies the logistic.
    """
    activation = read_activation(section, default="logistic")  # Darknet's default
    following = graph.following()
    if following is None or following.kind != "yolo" or not following.integer("new_coords", 0):
        return activation
    if activation not in ("logistic", "linear"):
        raise section.error("needs activation=logistic before a [yolo] with new_coords=1", "activation")
    if activation == "linear":
        # Such files come from programs that apply the logistic while decoding.
        graph.note(section, "is linear before a [yolo] with new_coords=1, read as logistic", "activation")
    return "linear"


def _shared_owner(graph: Graph, section: Section, needed: tuple[int, int, int, int]) -> Convolution:
    """The convolution that share_index names.

    needed: (input channels, filters, size, groups). Raises ModelError if it has others.
    """
    index = graph.resolve(section, "share_index", section.integer("share_index"))
    owner = graph.nodes[index].module
    if isinstance(owner, SharedConvolution):
        owner = owner.source
    if not isinstance(owner, Convolution):
        raise section.error(f"share_index names layer {index}, which is not a convolution", "share_index")
    conv = owner.conv
    has = (conv.in_channels, conv.out_channels, conv.kernel_size[0], conv.groups)
    if has != needed or _has_batch_norm(section) != (owner.norm is not None):
        raise section.error(f"shares the weights of layer {index}, whose shapes differ", "share_index")
    return owner
