"""Turn each kind of section into a node of the graph, with one function per kind."""

from collections.abc import Callable
from fractions import Fraction

from torch import nn

from models.cfg import Cfg, Section
from models.graph import IMAGES, Graph, Node, Shape
from models.heads import read_anchors, read_head
from models.layers import ACTIVATIONS, Convolution, Product, Route, SharedConvolution, Shortcut, YoloMap
from models.pools import Blur, ChannelMaxPool, Dropout, LocalAvgPool, MaxPool, Reorg, ScrambledReorg, SumPool, Upsample

MAX_WINDOW = 128  # rows of a kernel, dilation included, or of a pool; published networks have up to 16
CHANNEL_STEP = 8  # scaled filter counts are multiples of this
BN_EPS = 1e-6  # added to the variance, as in Darknet
BN_MOMENTUM = 0.03  # share of a batch in the running statistics


def read_strides(section: Section) -> tuple[int, int]:
    """Strides of (rows, columns): stride_y and stride_x if given, else stride."""
    stride = section.integer("stride", 1, minimum=1)
    return section.integer("stride_y", stride, minimum=1), section.integer("stride_x", stride, minimum=1)


def check_grid(
    section: Section, shape: Shape, size: int, strides: tuple[int, int], total_padding: int, blurred: bool
) -> None:
    """Refuse windows that do not divide the map exactly by their strides.

    That is (rows + total_padding - size) // stride + 1 = rows / stride, and so for columns.
    blurred: a low-pass filter after the layer has the strides, so the windows move by 1.
    """
    if size > MAX_WINDOW:
        raise section.error(f"has windows of {size} rows, more than {MAX_WINDOW}. fix: check size and dilation", "size")
    check_divisible(section, shape, max(strides))
    for stride in (1,) if blurred else strides:
        if not -stride <= total_padding - size < 0:
            raise section.error(
                f"with size {size}, stride {stride} and {total_padding} padded rows does not divide the map by"
                f" {stride}. fix: use pad=1 in a convolution, or leave out padding in a maxpool"
            )


def check_divisible(section: Section, shape: Shape, stride: int) -> None:
    """Refuse to divide the one pixel of a global pooling."""
    if shape.stride is None and stride > 1:
        raise section.error(f"divides a map of one pixel by {stride}. fix: use stride=1 after an [avgpool]")


def read_blur(section: Section, strides: tuple[int, int]) -> int | None:
    """Size of the antialiasing filter, which takes over the layer's stride; None without one."""
    kind = section.integer("antialiasing", 0, minimum=0, maximum=2)
    if kind == 2 and min(strides) == 1:
        raise section.error("antialiasing=2 needs strides of 2 or more: its window of 2 has no padding", "antialiasing")
    return {0: None, 1: 3, 2: 2}[kind]


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
    activation = section.choice("activation", "logistic", ACTIVATIONS)  # Darknet's default
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


def shortcut(graph: Graph, section: Section) -> Node:
    """[shortcut]: the previous map plus those of `from`."""
    source, shape = graph.previous(section)
    sources = (source, *(graph.resolve(section, "from", reference) for reference in section.integers("from")))
    graph.check_same_size(section, sources)
    weights_type = section.choice("weights_type", "none", ("none", "per_feature", "per_layer", "per_channel"))
    per_source = {"none": 0, "per_channel": shape.channels}.get(weights_type, 1)
    named = section.choice("weights_normalization", "none", ("none", "relu", "avg_relu", "softmax"))
    normalization = named.removeprefix("avg_")  # Darknet treats both alike
    graph.reserve(section, len(sources) * per_source)
    module = Shortcut(section.choice("activation", "linear", ACTIVATIONS), len(sources), per_source, normalization)
    return Node(module, sources, shape)


def route(graph: Graph, section: Section) -> Node:
    """[route]: the maps of `layers`, or one group of their channels, concatenated."""
    sources = tuple(graph.resolve(section, "layers", reference) for reference in section.integers("layers"))
    graph.check_same_size(section, sources)
    groups = section.integer("groups", 1, minimum=1)
    group = section.integer("group_id", 0, minimum=0)
    if group >= groups:
        raise section.error(f"group_id must be below groups={groups}, got {group}", "group_id")
    channels = [graph.shape(source).channels for source in sources]
    if any(count % groups for count in channels):
        raise section.error(f"groups={groups} must divide the channels of every source, {channels}", "groups")
    return Node(Route(groups, group), sources, graph.shape(sources[0]).scaled(sum(channels) // groups, 1))


def product(graph: Graph, section: Section) -> Node:
    """[sam], [scale_channels]: the map of `from` times the previous one (same size or 1x1)."""
    source, factors = graph.previous(section)
    other = graph.resolve(section, "from", section.integer("from"))
    shape = graph.shape(other)
    if factors.channels != shape.channels:
        raise section.error(f"multiplies maps of {factors.channels} and {shape.channels} channels", "from")
    if section.kind == "sam" or factors.stride is not None:
        graph.check_same_size(section, (source, other))
    return Node(Product(section.choice("activation", "linear", ACTIVATIONS)), (source, other), shape)


def maxpool(graph: Graph, section: Section) -> Node:
    """[maxpool], over windows or over channels, and [local_avgpool]."""
    source, shape = graph.previous(section)
    if section.integer("maxpool_depth", 0):
        out_channels = section.integer("out_channels", 1, minimum=1)
        if shape.channels % out_channels:
            raise section.error(f"out_channels must divide the {shape.channels} input channels", "out_channels")
        return Node(ChannelMaxPool(out_channels), (source,), shape.scaled(out_channels, 1))
    stride = read_strides(section)
    size = section.integer("size", stride[0], minimum=1)
    padding = section.integer("padding", size - 1, minimum=0)
    blur = read_blur(section, stride)
    check_grid(section, shape, size, stride, padding, blurred=blur is not None)
    kind = LocalAvgPool if section.kind == "local_avgpool" else MaxPool
    module: nn.Module = kind(size, stride if blur is None else (1, 1), padding)
    if blur is not None:
        module = nn.Sequential(module, Blur(blur, stride))
    return Node(module, (source,), shape.scaled(shape.channels, stride))


def avgpool(graph: Graph, section: Section) -> Node:
    """[avgpool]: the mean of each channel over the whole map."""
    source, shape = graph.previous(section)
    return Node(nn.AdaptiveAvgPool2d(1), (source,), Shape(shape.channels, None))


def upsample(graph: Graph, section: Section) -> Node:
    """[upsample], which sums over blocks if its stride is negative."""
    source, shape = graph.previous(section)
    stride = section.integer("stride", 2)
    scale = section.number("scale", 1.0)
    if stride == 0:
        raise section.error("stride must not be 0", "stride")
    if shape.stride is None:
        raise section.error(
            "enlarges a map of one pixel, whose stride is unknown. fix: no [upsample] after an [avgpool]"
        )
    if stride < 0:
        return Node(SumPool(-stride, scale), (source,), shape.scaled(shape.channels, -stride))
    return Node(Upsample(stride, scale), (source,), shape.scaled(shape.channels, Fraction(1, stride)))


def reorg(graph: Graph, section: Section) -> Node:
    """[reorg3d], and [reorg], which orders the values differently."""
    source, shape = graph.previous(section)
    stride = section.integer("stride", 1, minimum=1)
    check_divisible(section, shape, stride)
    if section.kind == "reorg" and shape.channels % stride**2:
        raise section.error(f"needs channels that {stride}x{stride} divides, got {shape.channels}", "stride")
    module = ScrambledReorg(stride) if section.kind == "reorg" else Reorg(stride)
    return Node(module, (source,), shape.scaled(shape.channels * stride**2, stride))


def dropout(graph: Graph, section: Section) -> Node:
    """[dropout], of single values or of blocks."""
    source, shape = graph.previous(section)
    probability = section.number("probability", 0.2)
    if not 0 <= probability < 1:
        raise section.error(f"probability must be 0 or more and below 1, got {probability:g}", "probability")
    block_size = section.integer("dropblock_size_abs", 7, minimum=1) if section.integer("dropblock", 0) else None
    return Node(Dropout(probability, block_size), (source,), shape)


def yolo(graph: Graph, section: Section) -> Node:
    """[yolo]: a raw map and its head."""
    source, shape = graph.previous(section)
    if source == IMAGES or not isinstance(graph.nodes[source].module, Convolution):
        raise section.error("must follow a [convolutional] layer that does not share the weights of another")
    if shape.stride is None or shape.stride[0] != shape.stride[1] or shape.stride[0].denominator != 1:
        raise section.error(f"reads a map of {shape}, but needs one whole stride for rows and columns")
    num_classes = section.integer("classes", 20, minimum=1)  # 20 is Darknet's default
    if graph.num_classes is not None:
        num_classes = graph.num_classes
    if graph.heads and graph.heads[0].num_classes != num_classes:
        other = graph.heads[0]
        raise section.error(
            f"has classes={num_classes}, but the [yolo] layer {other.layer} has {other.num_classes}."
            " fix: give both the same",
            "classes",
        )
    head = read_head(section, len(graph.nodes), shape.stride[0].numerator, num_classes)
    if shape.channels != (needed := len(head.anchors) * (5 + num_classes)):
        raise section.error(
            f"with {len(head.anchors)} anchors and {num_classes} classes needs filters={needed} in the convolution"
            f" before it, which has {shape.channels}. fix: correct one of them, or set the class count of the model"
        )
    if len(section.numbers("anchors")) % 2:
        last = "{:g},{:g}".format(*head.all_anchors[-1])
        graph.note(
            section, f"the number of anchor values is odd, a comma may be missing; the last pair is {last}", "anchors"
        )
    if "num" in section.options and max(head.mask) >= (num := section.integer("num")):
        graph.note(section, f"mask names anchor {max(head.mask)}, beyond num={num}; the list has it", "mask")
    graph.heads.append(head)
    return Node(YoloMap(len(head.anchors)), (source,), shape)


BUILDERS: dict[str, Callable[[Graph, Section], Node]] = {
    "convolutional": convolutional,
    "shortcut": shortcut,
    "route": route,
    "sam": product,
    "scale_channels": product,
    "maxpool": maxpool,
    "local_avgpool": maxpool,
    "avgpool": avgpool,
    "upsample": upsample,
    "reorg": reorg,
    "reorg3d": reorg,
    "dropout": dropout,
    "yolo": yolo,
}


def build_graph(cfg: Cfg, num_classes: int | None, width: float) -> Graph:
    """Build the graph of all sections. Raises ModelError with file and line for an invalid one."""
    graph = Graph(cfg, num_classes, width)
    for key in ("width", "height"):  # unused here, but a wrong value should fail early
        cfg.net.integer(key, 1, minimum=1)
    for section in cfg.layers:
        graph.add(section, BUILDERS[section.kind](graph, section))
    if not graph.heads:
        raise cfg.net.error("is not followed by any [yolo] section, so this is not a detector. fix: use another .cfg")
    return graph
