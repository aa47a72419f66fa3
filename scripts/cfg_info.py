"""Check a .cfg and print what network it makes: a table of layers, sums, heads, and which of its
options do nothing.

    python -m scripts.cfg_info model.cfg=my.cfg python -m scripts.cfg_info model=yolov3-spp
    image_size=608 num_classes=20 python -m scripts.cfg_info model.cfg=my.cfg
    model.weights=my.weights    # and whether the weights fit it

A .cfg that makes no network is answered with one sentence that names file and line, and exit code
2.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.programs import run

    run("cfg_info")
    raise SystemExit

import math
import textwrap
from collections.abc import Iterator
from dataclasses import fields

import torch
from torch import nn

from conf.build.network import build_model, load_network
from conf.failures import ConfigError
from conf.schema_tools import CfgInfoConfig
from models import Darknet, count_parameters
from models.cfg.keys import SECTION_KEYS
from models.cfg.parse import Cfg, Section
from models.network.darknet import layer_flops
from models.network.graph import IMAGES
from models.network.heads import DarknetLossKeys, Head
from models.network.layers import Convolution, SharedConvolution
from models.network.pools import Upsample
from models.network.receptive_field import Field, receptive_fields
from models.weights.darknet import weight_tensors
from models.weights.file import LONGEST_HEADER

COLUMNS = 120  # of the output
WHAT = 34  # of them for the options of a layer
ROW = "{:>5}  {:<15}{:<35}{:<21}{:>17}{:>13}{:>10}"
MOST_SOURCES = 4  # that a row names


def show(config: CfgInfoConfig) -> None:
    """Print the description of the network that is configured. Raises ModelError or ConfigError."""
    for key in ("fresh_heads", "freeze"):
        if getattr(config.model, key):
            raise ConfigError(f"model.{key} says nothing about a .cfg. fix: leave it out")
    cfg = load_network(config.model)
    with torch.device("meta"):  # shapes only: no memory is taken, no values are drawn
        model = Darknet(cfg, config.num_classes, config.model.width)
    print("\n".join(describe(model, image_size(config, model))))
    if config.model.weights is not None:
        print(f"\n{build_model(config.model, config.num_classes)[1]}")


def image_size(config: CfgInfoConfig, model: Darknet) -> tuple[int, int]:
    """(height, width) in pixels. Raises ConfigError where the network cannot take such images."""
    net = model.cfg.net
    if config.image_size is not None:
        size = config.image_size, config.image_size
    elif {"height", "width"} <= net.options.keys():
        size = net.integer("height"), net.integer("width")
    else:
        raise ConfigError(f"{model.cfg.source} gives no height and width. fix: image_size=<pixels>")
    if any(side % model.max_stride for side in size):
        step = model.max_stride
        height, width = (max(step, round(side / step) * step) for side in size)
        raise ConfigError(
            f"{model.cfg.source} cannot take {size[0]}x{size[1]} pixels, only multiples of {step}. fix: image_size="
            f"{height if config.image_size is not None else max(height, width)}"
        )
    return size


def describe(model: Darknet, size: tuple[int, int]) -> Iterator[str]:
    """The lines of the description for images of `size` (height, width) pixels."""
    yield ROW.format("layer", "kind", "what", "reads layer", "map", "parameters", "GFLOPs").rstrip()
    for index in range(len(model.layers)):
        yield _row(model, index, size)
    convolutions = sum(isinstance(layer, Convolution | SharedConvolution) for layer in model.layers)
    flops = sum(layer_flops(model, index, size) for index in range(len(model.layers)))
    stored = LONGEST_HEADER + 4 * sum(own.tensor.numel() for own in weight_tensors(model))
    yield ""
    yield f"{model.cfg.source}: {len(model.layers)} layers, {convolutions} convolutions"
    yield f"{count_parameters(model):,} parameters, a .weights file has {stored:,} bytes"
    yield f"{flops / 1e9:.2f} GFLOPs for {size[0]}x{size[1]} pixels, a multiply-add counting as two"
    yield f"image height and width must be multiples of {model.max_stride}"
    yield from ("", "heads")
    receptive = receptive_fields(model)
    for head in model.heads:
        yield from _wrapped(_head(model, head, size, receptive[head.layer]), "  ")
    if model.notes:
        yield from ("", "notes")
        for note in model.notes:
            yield from _wrapped(note, "  ")
    yield from _idle_options(model.cfg)


def _row(model: Darknet, index: int, size: tuple[int, int]) -> str:
    section, layer = model.cfg.layers[index], model.layers[index]
    names = ["image" if source == IMAGES else str(source) for source in model.sources[index]]
    if len(names) > MOST_SOURCES + 1:
        names[MOST_SOURCES:] = [f"{len(names) - MOST_SOURCES} more"]
    shape = model.shapes[index]
    rows, columns = shape.size(size)
    parameters, flops = count_parameters(layer), layer_flops(model, index, size)
    return ROW.format(
        index,
        section.kind,
        _cut(_what(section, layer, index), WHAT),
        ", ".join(names),
        f"{shape.channels} x {rows} x {columns}",
        f"{parameters:,}" if parameters else "",
        f"{flops / 1e9:.3f}" if flops else "",
    ).rstrip()


def _what(section: Section, layer: nn.Module, index: int) -> str:
    """The options that say most about a layer, in short."""
    if isinstance(layer, Convolution | SharedConvolution):
        return _convolution(section, layer, index)
    if section.integer("maxpool_depth", 0):
        return "over channels"
    if section.kind in ("maxpool", "local_avgpool"):
        stride = section.integer("stride", 1)
        strides = section.integer("stride_y", stride), section.integer("stride_x", stride)
        return _window(section.integer("size", stride), *strides) + (
            " antialiased" * ("antialiasing" in section.options)
        )
    if section.kind == "upsample":
        stride = section.integer("stride", 2)
        scale = section.number("scale", 1.0)
        return f"{'x' if isinstance(layer, Upsample) else '/'}{abs(stride)}" + (f" scale {scale:g}" * (scale != 1))
    if section.kind in ("reorg", "reorg3d"):
        return f"/{section.integer('stride', 1)}"
    if section.kind == "yolo":
        return f"anchors {section.text('mask', 'all')}"
    if section.kind == "route" and section.integer("groups", 1) > 1:
        return f"part {section.integer('group_id', 0)} of {section.integer('groups')}"
    named = (section.options.get(key, "") for key in ("weights_type", "activation", "probability"))
    return " ".join(word for word in named if word not in ("", "none", "linear"))


def _convolution(section: Section, layer: Convolution | SharedConvolution, index: int) -> str:
    conv = layer.conv if isinstance(layer, Convolution) else layer.source.conv
    stride = section.integer("stride", 1)
    strides = section.integer("stride_y", stride), section.integer("stride_x", stride)
    dilation = layer.dilation if isinstance(layer, SharedConvolution) else conv.dilation[0]
    shared = section.integer("share_index", 0)
    norm = layer.norm if isinstance(layer, Convolution) else layer.source.norm
    said = {
        f"groups {conv.groups}": conv.groups > 1,
        f"dilation {dilation}": dilation > 1,
        "xnor": isinstance(layer, Convolution) and layer.xnor,
        "antialiased": isinstance(layer, Convolution) and layer.blur is not None,
        f"shares {shared if shared >= 0 else index + shared}": isinstance(layer, SharedConvolution),
        "bn": norm is not None,
        section.text("activation", "logistic"): True,
    }
    words = [f"{conv.out_channels:>4}", _window(conv.kernel_size[0], *strides), *(key for key in said if said[key])]
    return " ".join(words)


def _window(size: int, row_stride: int, column_stride: int) -> str:
    """A window and its stride, as 3x3/2, or 8x8/4x8 with strides in rows and columns."""
    stride = str(row_stride) if row_stride == column_stride else f"{row_stride}x{column_stride}"
    return f"{size}x{size}/{stride}"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _head(model: Darknet, head: Head, size: tuple[int, int], field: Field) -> str:
    rows, columns = model.shapes[head.layer].size(size)
    anchors = "  ".join(f"{width:g},{height:g}" for width, height in head.anchors)
    seen = "the whole image" if field is None else "{} x {} pixels".format(*map(math.ceil, field))
    return (
        f"layer {head.layer}: stride {head.stride}, map {rows} x {columns}, {head.num_classes}"
        f" {'class' if head.num_classes == 1 else 'classes'}, receptive field {seen}, anchors {anchors}"
    )


def _idle_options(cfg: Cfg) -> Iterator[str]:
    """The options that change nothing here, and those that only one loss reads, by the kinds of
    their sections.
    """
    loss_only = {field.name for field in fields(DarknetLossKeys)}
    idle: dict[str, set[str]] = {}
    of_the_loss: set[str] = set()
    for section in (cfg.net, *cfg.layers):
        keys = SECTION_KEYS[section.kind]
        idle.setdefault(section.kind, set()).update(section.options.keys() & (keys.ignored | keys.unbuilt))
        if section.kind == "yolo":
            of_the_loss |= section.options.keys() & loss_only
    if any(idle.values()):
        yield from ("", "options that change nothing here (training is set by this project's configuration)")
        for kind, names in idle.items():
            if names:
                yield from _wrapped(f"[{kind}] {', '.join(sorted(names))}", "  ")
    if of_the_loss:
        yield from ("", "options that only loss=darknet reads")
        yield from _wrapped(f"[yolo] {', '.join(sorted(of_the_loss))}", "  ")


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, initial_indent=indent, subsequent_indent=indent * 2, break_on_hyphens=False)
