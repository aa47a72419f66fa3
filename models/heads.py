"""The [yolo] sections of a .cfg: their anchors, decoding and options for Darknet's loss."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from models.cfg import Cfg, ModelError, Section
from models.config import MAX_ANCHOR, MAX_SCALE_X_Y, MIN_ANCHOR, IouKind

MISSING_HEIGHT = 0.5  # pixels, of an incomplete last anchor, as in Darknet
MAX_BINS = 64
Sizes = tuple[tuple[float, float], ...]  # (width, height) in pixels at network scale


@dataclass(frozen=True)
class DarknetLossKeys:
    """The options of a [yolo] section for Darknet's loss, with Darknet's defaults."""

    iou_loss: IouKind | None = None  # of the box term; None: squared errors of raw values ("mse")
    iou_normalizer: float = 0.75  # weights of the box, class and objectness terms
    cls_normalizer: float = 1.0
    obj_normalizer: float = 1.0
    ignore_thresh: float = 0.5  # a box that overlaps an object by more than this is not a negative
    iou_thresh: float = 1.0  # anchors whose shape overlaps an object's by more are positive, too; 1: none


class RawPart(NamedTuple):
    """A convolution that makes a raw map or a part of it: its layer, and how its filters count."""

    layer: int
    fixed: int
    per_class: int

    def filters(self, num_classes: int) -> int:
        """Its filters for that many classes."""
        return self.fixed + self.per_class * num_classes


@dataclass(frozen=True)
class Head:
    """One [yolo] section, as needed to assign targets to its raw map and to decode it."""

    layer: int  # its Darknet layer index
    stride: int  # pixels per cell
    anchors: Sizes  # those of all_anchors that mask selects
    num_classes: int
    scale_x_y: float = 1.0  # a centre lies at sigmoid * scale_x_y - (scale_x_y - 1) / 2 of its cell
    new_coords: bool = False  # sizes are (2 * sigmoid)^2 anchors instead of exp(raw) anchors
    linear_xy: bool = False  # a centre lies at raw of its cell; scale_x_y says which cells learn it (YOLOX)
    # Logits for each side (left, top, right, bottom) instead of these. Its distance from the middle
    # of the cell, in cells, is the mean of 0, 1, ... weighted by their softmax.
    box_bins: int = 0
    all_anchors: Sizes = ()
    mask: tuple[int, ...] = ()
    parts: tuple[RawPart, ...] = ()  # the convolutions that make the raw map, in the order of its values
    darknet_loss: DarknetLossKeys = DarknetLossKeys()

    def split(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Coordinates (..., 4 or 4 * box_bins), objectness (..., 1) and classes of raw values."""
        box, objectness, classes = values.split((4 * max(1, self.box_bins), 1, self.num_classes), -1)
        return box, objectness, classes


class Anchors(NamedTuple):
    """The anchors of a head as tensors on the device of its raw map."""

    own: Tensor  # (a, 2) widths and heights in pixels
    all: Tensor  # (n, 2) those of the whole .cfg
    mask: Tensor  # int64 (a,): indices of own in all


class HeadMap(NamedTuple):
    """A head, its anchors and its raw map."""

    head: Head
    anchors: Anchors
    raw: Tensor


class HeadAnchors(dict[torch.device, list[Anchors]]):
    """The anchors of every head by device, copied once to each, because copying blocks."""

    def __init__(self, heads: Sequence[Head]) -> None:
        self.heads = heads

    def __missing__(self, device: torch.device) -> list[Anchors]:
        anchors = []
        for head in self.heads:
            values = head.anchors, head.all_anchors, head.mask
            anchors.append(Anchors(*[torch.tensor(each, device=device) for each in values]))
        self[device] = anchors  # stored once complete, because several threads may look at the same time
        return anchors


def warn_of_reach(heads: Sequence[Head], image_size: int | Sequence[int]) -> str | None:
    """A sentence if bins cannot reach the sides of a box as large as an image; None if they can.

    image_size: a side, or height and width, in pixels.
    """
    longest = image_size if isinstance(image_size, int) else max(image_size)
    head = max(heads, key=attrgetter("stride"))
    reach = 2 * (head.box_bins - 1) * head.stride
    if not head.box_bins or longest <= reach:
        return None
    bins = math.ceil(longest / (2 * head.stride)) + 1
    cut = f"{head.box_bins} bins reach boxes of {reach} pixels, and images have {longest}"
    return f"warning: {cut}: larger boxes are cut. fix: model.box_bins={bins}"


def read_raw_parts(layers: Sequence[Section]) -> dict[int, tuple[Section, RawPart]]:
    """The convolutions that make raw maps, by layer, each with the [yolo] that reads it.

    That is the layer before a [yolo] or, if a [route] joins two layers there, these: the first
    makes the boxes and objectness of one anchor, the second its classes.
    """
    parts = {}
    for index, section in enumerate(layers):
        if section.kind != "yolo" or index == 0:
            continue
        before = layers[index - 1]
        joined = before.values("layers", int) if before.kind == "route" else []
        if len(joined) == 2:
            of_box = 4 * max(1, section.integer("box_bins", 0, 0, MAX_BINS)) + 1
            for number, fixed, per_class in ((joined[0], of_box, 0), (joined[1], 0, 1)):
                layer = number if number >= 0 else index - 1 + number
                parts[layer] = section, RawPart(layer, fixed, per_class)
        else:
            anchors = len(read_anchors(section)[1])
            parts[index - 1] = section, RawPart(index - 1, 5 * anchors, anchors)
    return parts


def read_head(section: Section, layer: int, stride: int, num_classes: int, parts: tuple[RawPart, ...]) -> Head:
    """The head of a [yolo] section. Raises ModelError with file and line for bad values."""
    all_anchors, mask = read_anchors(section)
    iou_loss = section.choice("iou_loss", "mse", ("mse", *IouKind.__members__))
    numbers = {}
    for field in fields(DarknetLossKeys):
        if isinstance(field.default, float):
            numbers[field.name] = section.number(field.name, field.default, minimum=0)
    return Head(
        layer,
        stride,
        tuple(map(all_anchors.__getitem__, mask)),
        num_classes,
        scale_x_y=section.number("scale_x_y", 1.0, minimum=1, maximum=MAX_SCALE_X_Y),
        new_coords=section.flag("new_coords"),
        linear_xy=section.flag("linear_xy"),
        box_bins=section.integer("box_bins", 0, 0, MAX_BINS),
        all_anchors=all_anchors,
        mask=mask,
        parts=parts,
        darknet_loss=DarknetLossKeys(None if iou_loss == "mse" else IouKind[iou_loss], **numbers),
    )


def read_anchors(section: Section) -> tuple[Sizes, tuple[int, ...]]:
    """All anchors of a [yolo] section, and the indices of those that its mask selects.

    All listed pairs count, even beyond `num`, because published files list more.
    """
    values = section.values("anchors", float, MIN_ANCHOR, MAX_ANCHOR)
    if len(values) % 2:
        values.append(MISSING_HEIGHT)
    anchors = tuple(zip(values[::2], values[1::2], strict=True))
    if "mask" in section.options:
        mask = section.values("mask", int, 0)
        if max(mask) >= len(anchors):
            selects = f"mask selects {max(mask)}, but anchors lists 0..{len(anchors) - 1}"
            fix = "put commas between all numbers of mask and of anchors, each in one line; ';' begins a comment"
            raise section.error(selects, "mask", fix)
        return anchors, tuple(mask)
    return anchors, tuple(range(section.integer("num", 1, 1, len(anchors))))


def with_box_bins(cfg: Cfg, bins: int) -> Cfg:
    """The .cfg with `box_bins` set in all [yolo]; the filters before them follow."""
    return cfg.with_options((section, "box_bins", bins) for section in cfg.layers if section.kind == "yolo")


def with_anchors(cfg: Cfg, anchors: Sequence[Sequence[float]] | str) -> Cfg:
    """The .cfg with other anchors, (width, height) in pixels at network scale, in all [yolo].

    Raises ModelError for another number of them, and for "auto", which train.py resolves.
    """
    if isinstance(anchors, str):
        raise ModelError("model.anchors=auto is for train.py, which fits them to its data", "leave it out here")
    text = ",  ".join(f"{width:g},{height:g}" for width, height in anchors)
    changes = []
    for section in (section for section in cfg.layers if section.kind == "yolo"):
        count = len(read_anchors(section)[0])
        if count != len(anchors):
            needed = f"{cfg.source}:{section.line} needs {count}"
            raise ModelError(f"model.anchors holds {len(anchors)} anchors, {needed}", f"{count} pairs [width,height]")
        changes += [(section, "anchors", text), (section, "num", count)]
    return cfg.with_options(changes)
