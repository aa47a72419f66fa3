"""A Darknet network as a torch module."""

import copy
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from models.cfg import Cfg, Section, load_cfg, parse_cfg, with_options
from models.errors import ModelError
from models.graph import IMAGES, Graph
from models.heads import Head
from models.layers import Convolution, SharedConvolution, YoloMap

Version = tuple[int, int, int]
WEIGHTS_VERSION: Version = (0, 2, 5)  # major, minor, revision of .weights files, as Darknet writes them today


class Darknet(nn.Module):
    """The network of a .cfg.

    cfg: path of a .cfg file, or one already parsed. num_classes: class count of the [yolo] sections
    and the convolutions before them; None: that of the file. width: factor for the filters of all
    other convolutions, rounded to multiples of 8. Raises ModelError, naming file and line, for an
    invalid .cfg.
    """

    takes_any_size = True  # of multiples of max_stride; an exported file may take one alone

    def __init__(self, cfg: str | Path | Cfg, num_classes: int | None = None, width: float = 1.0) -> None:
        super().__init__()
        if num_classes is not None and num_classes < 1:
            raise ModelError(f"the number of classes must be 1 or more, got {num_classes}")
        self.cfg = cfg if isinstance(cfg, Cfg) else load_cfg(cfg)
        self.width = width
        graph = Graph(self.cfg, num_classes, width)
        self.layers = nn.ModuleList([node.module for node in graph.nodes])  # an index is a Darknet layer index
        self.heads = graph.heads  # one for each [yolo] section, in the order of the raw maps
        self.notes = graph.notes  # oddities of the .cfg that a user should know about, one sentence each
        self.shapes = [node.shape for node in graph.nodes]  # channels and strides of each layer's map
        self.sources = [node.sources for node in graph.nodes]  # the layers that each layer reads
        self.num_classes = self.heads[0].num_classes
        self.max_stride = graph.max_stride  # image rows and columns must be multiples of this
        self.bn_eps = graph.bn_eps  # what batch norm adds to the variance
        self.in_channels = graph.shapes[IMAGES].channels
        self.seen = 0  # images that the weights were trained on; with the version the header of .weights files
        self.weights_version = WEIGHTS_VERSION
        self.num_frozen = 0  # how many of the first layers are not trained
        self._released: list[list[int]] = [[] for _ in graph.nodes]  # maps to free after each layer
        for source, reader in graph.last_readers.items():
            self._released[reader].append(source)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Raw maps (batch, anchors, rows, columns, 5 + classes), one per head in file order.

        images: float (batch, in_channels, height, width), RGB in 0..1; height and width multiples
        of max_stride. They become float64 if the weights are. The last dimension of a map is x, y,
        w, h (or 4 * box_bins logits), objectness, classes, all before any activation. Raises
        ModelError for images of another size or number of channels.
        """
        channels, height, width = images.shape[-3:]
        if channels != self.in_channels:
            raise ModelError(
                f"{self.cfg.source} is for images of {self.in_channels} channels, these have {channels}."
                f" fix: channels={channels} in its [net] section"
            )
        if (height, width) != (nearest := self.nearest_size(height, width)):
            raise ModelError(
                f"image size {height}x{width} is not a multiple of the network's stride {self.max_stride}."
                f" fix: the nearest is {nearest[0]}x{nearest[1]}"
            )
        if self.head_convolutions(self.heads[0])[0].conv.weight.dtype == torch.float64:
            images = images.double()
        maps: dict[int, Tensor] = {IMAGES: images}
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
        """Freeze the parameters and batch norm statistics of layers 0 .. first_n_layers - 1.

        0 releases all. Raises ModelError if that is out of range or leaves nothing to train.
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

        Otherwise the first epochs only unlearn false objects, since sigmoids start at 0.5. The
        offsets are those of the published YOLOv3-SPP recipe: -4.5 for objectness, log(0.6 /
        (classes - 0.99)) for every class.
        """
        for head in self.heads:
            for part, convolution in zip(head.parts, self.head_convolutions(head), strict=True):
                bias = convolution.conv.bias if convolution.norm is None else convolution.norm.bias
                assert bias is not None
                per_anchor, classes_from = bias.view(len(head.anchors), -1), part.fixed // len(head.anchors)
                per_anchor[:, classes_from - 1 : classes_from] -= 4.5
                per_anchor[:, classes_from:] += math.log(0.6 / (head.num_classes - 0.99))

    def head_convolutions(self, head: Head) -> list[Convolution]:
        """The convolutions that make the raw map of `head`: one, or those of boxes and classes."""
        layers = [self.layers[part.layer] for part in head.parts]
        return [layer for layer in layers if isinstance(layer, Convolution)]  # as the graph ensures


def count_parameters(model: nn.Module) -> int:
    """Number of parameters. Batch norm statistics do not count."""
    return sum(map(Tensor.numel, model.parameters()))


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
    changes = list[tuple[Section, str, str]]()
    for section, layer in zip(model.cfg.layers, model.layers, strict=True):
        convolution = layer.source if isinstance(layer, SharedConvolution) else layer
        values = {"classes": model.num_classes} if isinstance(layer, YoloMap) else {}
        if section.options.get("activation") == "silu":
            changes.append((section, "activation", "swish"))
        if isinstance(convolution, Convolution):
            values = {"filters": convolution.conv.out_channels}
            if "groups" in section.options:
                values["groups"] = convolution.conv.groups
        changes += [(section, key, str(value)) for key, value in values.items() if section.integer(key, -1) != value]
    return with_options(model.cfg.text, changes)


def cfg_with_anchors_of(model: Darknet, other: Darknet) -> Cfg:
    """``model.cfg`` with the anchors of the heads of ``other``.

    It is unchanged if the two networks differ in classes or number of anchors.
    """
    shapes = ([(head.num_classes, len(head.anchors)) for head in one.heads] for one in (model, other))
    if next(shapes) != next(shapes):
        return model.cfg
    changes = list[tuple[Section, str, str]]()
    for ours, theirs in zip(model.heads, other.heads, strict=True):
        if ours.all_anchors != theirs.all_anchors:
            section, source = model.cfg.layers[ours.layer], other.cfg.layers[theirs.layer]
            changes += [(section, key, source.text(key, 1)) for key in ("anchors", "num")]
    return parse_cfg(with_options(model.cfg.text, changes), model.cfg.source) if changes else model.cfg


def for_detection(model: Darknet, device: torch.device) -> Darknet:
    """``model`` in the form that detects fastest on its device.

    It is in channels_last memory, as the images are. On a GPU it is a copy with batch norm folded
    into the convolutions; on a CPU it is the model itself, whose metrics stay equal to the bit.
    """
    fastest = model if device.type == "cpu" else fuse_batch_norm(model)
    return fastest.to(memory_format=torch.channels_last)


@torch.no_grad()
def fuse_batch_norm(model: Darknet) -> Darknet:
    """A copy for evaluation, with batch normalisation folded into the convolutions.

    Folding is computed in float64, so that only the result is rounded. Binary (xnor) convolutions
    keep their batch normalisation.
    """
    fused = copy.deepcopy(model).eval()
    for layer in fused.layers:
        if isinstance(layer, Convolution) and layer.norm is not None and not layer.xnor:
            dtype = layer.conv.weight.dtype
            layer.conv = nn.utils.fuse_conv_bn_eval(layer.conv.double(), layer.norm.double()).to(dtype)
            layer.norm = None
    return fused
