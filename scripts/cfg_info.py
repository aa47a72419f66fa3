"""Check a .cfg and print the network that it makes: layers, sums, heads and options without effect.

    python -m scripts.cfg_info model.cfg=my.cfg
    python -m scripts.cfg_info model=yolov3-spp image_size=608 num_classes=20
    python -m scripts.cfg_info model.cfg=my.cfg model.weights=my.weights  # do the weights fit?

For a .cfg that makes no network it prints one sentence with file and line, and exits with code 2.
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
from models import Darknet, count_flops, count_parameters
from models.cfg.keys import SECTION_KEYS
from models.cfg.parse import Cfg, Section
from models.network.darknet import layer_flops
from models.network.graph import IMAGES
from models.network.heads import DarknetLossKeys, Head
from models.network.layers import Convolution, SharedConvolution
from models.network.pools import Upsample
from models.network.receptive_field import Field, receptive_fields
from models.network.section_options import read_strides
from models.weights.darknet import weight_tensors
from models.weights.file import LONGEST_HEADER
from models.weights.report import plural

COLUMNS = 120  # characters in a line of output
WHAT = 34  # of them for the options of a layer
ROW = "{:>5}  {:<15}{:<35}{:<21}{:>17}{:>13}{:>10}"
MOST_SOURCES = 4  # named in a row


def show(config: CfgInfoConfig) -> None:
    """Print the description of the configured network. Raises ModelError or ConfigError."""
    for key in ("fresh_heads", "freeze"):
        if getattr(config.model, key):
            raise ConfigError(f"model.{key} says nothing about a .cfg. fix: leave it out")
    cfg = load_network(config.model)
    with torch.device("meta"):  # shapes only, without memory or random values
        model = Darknet(cfg, config.num_classes, config.model.width)
    print("\n".join(describe(model, image_size(config, model))))
    if config.model.weights is not None:
        print(f"\n{build_model(config.model, config.num_classes)[1]}")


def image_size(config: CfgInfoConfig, model: Darknet) -> tuple[int, int]:
    """(height, width) in pixels. Raises ConfigError if the network cannot read such images."""
    net = model.cfg.net
    if config.image_size is not None:
        size = config.image_size, config.image_size
    elif {"height", "width"} <= net.options.keys():
        size = net.integer("height"), net.integer("width")
    else:
        raise ConfigError(f"{model.cfg.source} gives no height and width. fix: image_size=<pixels>")
    if (nearest := model.nearest_size(*size)) != size:
        raise ConfigError(
            f"{model.cfg.source} cannot take {size[0]}x{size[1]} pixels, only multiples of {model.max_stride}."
            f" fix: image_size={max(nearest)}"
        )
    return size


def describe(model: Darknet, size: tuple[int, int]) -> Iterator[str]:
    """The lines of the description for images of `size` (height, width) pixels."""
    yield ROW.format("layer", "kind", "what", "reads layer", "map", "parameters", "GFLOPs").rstrip()
    for index in range(len(model.layers)):
        yield _row(model, index, size)
    convolutions = sum(isinstance(layer, Convolution | SharedConvolution) for layer in model.layers)
    stored = LONGEST_HEADER + 4 * sum(own.tensor.numel() for own in weight_tensors(model))
    yield ""
    yield f"{model.cfg.source}: {len(model.layers)} layers, {convolutions} convolutions"
    yield f"{count_parameters(model):,} parameters, a .weights file has {stored:,} bytes"
    yield f"{count_flops(model, size) / 1e9:.2f} GFLOPs for {size[0]}x{size[1]} pixels, a multiply-add counting as two"
    yield f"image height and width must be multiples of {model.max_stride}"
    yield from ("", "heads")
    receptive = receptive_fields(model)
    for head in model.heads:
        yield from _wrapped(_head(model, head, size, receptive[head.layer]))
    if model.notes:
        yield from ("", "notes")
        for note in model.notes:
            yield from _wrapped(note)
    yield from _idle_options(model.cfg)


def _row(model: Darknet, index: int, size: tuple[int, int]) -> str:
    section, layer = model.cfg.layers[index], model.layers[index]
    names = ["image" if source == IMAGES else str(source) for source in model.sources[index]]
    if len(names) > MOST_SOURCES + 1:
        names[MOST_SOURCES:] = [f"{len(names) - MOST_SOURCES} more"]
    shape, what = model.shapes[index], _what(section, layer, index)
    rows, columns = shape.size(size)
    parameters, flops = count_parameters(layer), layer_flops(model, index, size)
    return ROW.format(
        index,
        section.kind,
        what if len(what) <= WHAT else f"{what[: WHAT - 3]}...",
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
        size = section.integer("size", section.integer("stride", 1))
        return _window(section, size) + " antialiased" * ("antialiasing" in section.options)
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
    owner = layer.source if isinstance(layer, SharedConvolution) else layer
    conv = owner.conv
    dilation = layer.dilation if isinstance(layer, SharedConvolution) else conv.dilation[0]
    shared = section.integer("share_index", 0)
    said = {
        f"groups {conv.groups}": conv.groups > 1,
        f"dilation {dilation}": dilation > 1,
        "xnor": isinstance(layer, Convolution) and layer.xnor,
        "antialiased": isinstance(layer, Convolution) and layer.blur is not None,
        f"shares {shared if shared >= 0 else index + shared}": isinstance(layer, SharedConvolution),
        "bn": owner.norm is not None,
        section.text("activation", "logistic"): True,
    }
    words = [f"{conv.out_channels:>4}", _window(section, conv.kernel_size[0]), *(key for key in said if said[key])]
    return " ".join(words)


def _window(section: Section, size: int) -> str:
    """A window and its stride, as 3x3/2, or 8x8/4x8 if rows and columns have their own strides."""
    rows, columns = read_strides(section, default=1)
    return f"{size}x{size}/{rows}" + f"x{columns}" * (rows != columns)


def _head(model: Darknet, head: Head, size: tuple[int, int], field: Field) -> str:
    rows, columns = model.shapes[head.layer].size(size)
    anchors = "  ".join(f"{width:g},{height:g}" for width, height in head.anchors)
    seen = "the whole image" if field is None else "{} x {} pixels".format(*map(math.ceil, field))
    return (
        f"layer {head.layer}: stride {head.stride}, map {rows} x {columns}, {plural(head.num_classes, 'class')},"
        f" receptive field {seen}, anchors {anchors}"
    )


def _idle_options(cfg: Cfg) -> Iterator[str]:
    """The options without effect, and those that only one loss reads, by kind of section."""
    given: dict[str, set[str]] = {}
    for section in (cfg.net, *cfg.layers):
        given.setdefault(section.kind, set()).update(section.options)
    idle = {kind: names & (SECTION_KEYS[kind].ignored | SECTION_KEYS[kind].unbuilt) for kind, names in given.items()}
    of_the_loss = {"yolo": given.get("yolo", set()) & {field.name for field in fields(DarknetLossKeys)}}
    for title, options in (
        ("options without effect here (this project's configuration sets the training)", idle),
        ("options that only loss=darknet reads", of_the_loss),
    ):
        if any(options.values()):
            yield from ("", title)
        for kind, names in options.items():
            if names:
                yield from _wrapped(f"[{kind}] {', '.join(sorted(names))}")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
