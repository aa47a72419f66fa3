"""Read Darknet .cfg files into typed sections. Every error names the file and the line.

A .cfg is a list of sections, each a `[kind]` line followed by `key=value` lines. The first section
is [net]; the others are the layers, numbered from 0 in file order.

Of [net] only width, height, channels and bn_eps have an effect here; the rest steers Darknet's
training. The options of a layer shape the network, or steer only training and display. Any other
might change what the network computes, so it is refused, never skipped.
"""

import difflib
import errno
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import yaml

from models.yolox import SIZES, yolox_cfg

Number = TypeVar("Number", int, float)
INT_MAX = 2**31 - 1  # Darknet's integers have 32 bits


class ModelError(ValueError):
    """An unusable .cfg, weights file or model option, named by ``sentence``; ``fix`` mends it."""

    def __init__(self, sentence: str, fix: str = "") -> None:
        super().__init__(f"{sentence}. fix: {fix}" if fix else sentence)
        self.sentence = sentence
        self.fix = fix


class ZooNetwork(NamedTuple):
    """What models/zoo/<name>.cfg, or models/yolox.py, does not say."""

    backbone_layers: int  # the first layers, which Darknet's users keep and model.freeze=backbone freezes
    row: list[str]  # of the table in docs/train/pretrained.md
    box_bins: int | None = None  # of model.box_bins=null; a key that Darknet does not have


ZOO_FOLDER = Path(__file__).parent / "zoo"
_FACTS = yaml.safe_load((ZOO_FOLDER / "networks.yaml").read_text())
ZOO = {name: ZooNetwork(**facts) for name, facts in _FACTS.items()}

# Every layer may have these; they steer only Darknet's training.
_TRAINING = "stopbackward onlyforward dont_update burnin_update train_only_bn clip learning_rate"


def layer_keys(names: str) -> frozenset[str]:
    """The keys that a layer may have: its own, and those of every layer."""
    return frozenset(f"{names} {_TRAINING}".split())


SECTION_KEYS = {
    "convolutional": layer_keys(
        "filters size stride pad padding dilation groups batch_normalize activation share_index xnor"
        # without effect here
        " grad_centr bin_output binary assisted_excitation angle stream wait_stream"
    ),
    "shortcut": layer_keys("from activation"),
    "route": layer_keys("layers groups group_id stream wait_stream"),
    "upsample": layer_keys("stride"),
    "maxpool": layer_keys("size stride padding maxpool_zero_nonmax"),
    "avgpool": layer_keys(""),
    "sam": layer_keys("from activation"),
    "scale_channels": layer_keys("from activation"),
    "dropout": layer_keys("probability"),
    "reorg3d": layer_keys("stride"),
    "yolo": layer_keys(
        "mask anchors num classes scale_x_y new_coords linear_xy box_bins iou_loss iou_normalizer"
        " cls_normalizer obj_normalizer ignore_thresh iou_thresh"
        # without effect here
        " truth_thresh label_smooth_eps"
        " jitter resize random iou_thresh_kind uc_normalizer delta_normalizer nms_kind beta_nms beta1"
        " objectness_smooth max_delta focal_loss counters_per_class max map show_details thresh"
        " embedding_layer track_history_size sim_thresh dets_for_show dets_for_track track_ciou_norm"
    ),
}


@dataclass(frozen=True)
class Section:
    """One section of a .cfg: its kind, its options as written, and their lines for messages."""

    kind: str
    source: str
    line: int
    options: dict[str, str] = field(default_factory=dict)
    option_lines: dict[str, int] = field(default_factory=dict)

    def error(self, message: str, key: str | None = None, fix: str = "") -> ModelError:
        """A ModelError with the file and the line of `key`, or of the section without the key."""
        line = self.line if key is None else self.option_lines.get(key, self.line)
        return ModelError(f"{self.source}:{line}: [{self.kind}] {message}", fix)

    def text(self, key: str, default: object = None) -> str:
        """The value of `key`, which is required unless there is a default."""
        value = self.options.get(key, default)
        if value is None:
            raise self.error(f"has no {key}", fix=f"add a line {key}=<value>")
        return str(value)

    def choice(self, key: str, default: str, choices: Collection[str]) -> str:
        """The value of `key`, one of `choices`."""
        value = self.text(key, default)
        if value not in choices:
            raise self.error(f"has no {key} {value[:40]!r}; {nearest_name(value, choices)}", key)
        return value

    def integer(self, key: str, default: int | None = None, minimum: int = -INT_MAX, maximum: int = INT_MAX) -> int:
        """`key` as an int from `minimum` to `maximum`, required unless there is a default."""
        return self._parsed(key, self.text(key, default), int, minimum, maximum)

    def flag(self, key: str) -> bool:
        """Whether `key` is there and not 0."""
        return self.integer(key, 0) != 0

    def number(self, key: str, default: float, minimum: float, maximum: float = INT_MAX) -> float:
        """`key` as a float from `minimum` to `maximum`; `default` if it is not there."""
        return self._parsed(key, self.text(key, default), float, minimum, maximum)

    def values(self, key: str, kind: type[Number], minimum: float = -INT_MAX, maximum: float = INT_MAX) -> list[Number]:
        """A comma-separated list of ints or floats, at least one. It may end with a comma."""
        fix = "put commas between all values, on one line"
        items = self.text(key).strip(",").split(",")
        return [self._parsed(key, item, kind, minimum, maximum, fix=fix) for item in items]

    def _parsed(
        self, key: str, text: str, kind: type[Number], minimum: float, maximum: float, *, fix: str = ""
    ) -> Number:
        try:
            value = kind(text)
        except ValueError:
            noun = "whole number" if kind is int else "number"
            raise self.error(f"{key} needs a {noun}, got {text[:40]!r}", key, fix) from None
        if not minimum <= value <= maximum:
            raise self.error(f"{key} must lie in {minimum}..{maximum}, got {text[:40]}", key)
        return value


@dataclass(frozen=True)
class Cfg:
    """A whole .cfg: its text and source, the [net] section, and the layers in file order."""

    text: str
    source: str
    net: Section
    layers: list[Section]

    def with_options(self, changes: Iterable[tuple[Section, str, object]]) -> "Cfg":
        """With each (section, key, value) on the key's line, or a new one at the section's top."""
        lines = self.text.split("\n")  # as the parser counts them
        edits = []
        for section, key, value in changes:
            line = section.option_lines.get(key, section.line)
            edits.append((line, key in section.options, f"{key}={value}"))
        for line, replaces, text in sorted(edits, reverse=True):  # from the end: earlier numbers stay valid
            lines[line - 1 if replaces else line : line] = [text]
        return parse_cfg("\n".join(lines), self.source)


def regular(path: Path) -> Path:
    """The path itself. Raises OSError for a pipe or a device, which may never end."""
    if path.is_fifo() or path.is_char_device():
        raise OSError(errno.EINVAL, "not a regular file")
    return path


def load_cfg(path: str | Path) -> Cfg:
    """Read the .cfg file at `path`. Raises ModelError if it is missing or invalid."""
    try:
        # Comments of published files use many encodings. Everything else is ASCII.
        content = regular(Path(path)).read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read the cfg file {path} ({error.strerror})", "model.cfg=<a Darknet .cfg>") from error
    if b"\0" in content[:64]:
        raise ModelError(f"{path} is UTF-16, as PowerShell writes it, or not a text", "save it as UTF-8")
    return parse_cfg(content.decode("utf-8-sig", errors="replace").replace("\r\n", "\n"), str(path))


def image_size_of(cfg: Cfg) -> int | list[int]:
    """The side in pixels of the square images that a .cfg was made for, or [height, width]."""
    height = cfg.net.integer("height", minimum=1)
    width = cfg.net.integer("width", minimum=1)
    return height if height == width else [height, width]


def parse_cfg(text: str, source: str) -> Cfg:
    """Parse the text of a .cfg, called `source` in messages. Raises ModelError."""
    sections: list[Section] = []
    # Not splitlines, which also splits at form feeds and the like; comments may hold those.
    for number, line in enumerate(text.split("\n"), start=1):
        content = line.partition("#")[0].partition(";")[0].strip()
        place, shown = f"{source}:{number}:", repr(content[:40])
        if not sections and content not in ("", "[net]", "[network]"):
            raise ModelError(f"{place} {shown} comes before [net]", "check the path")
        if content.startswith("["):
            kind = content.strip("[] \t").lower() if sections else "net"
            if sections and not (content.endswith("]") and kind in SECTION_KEYS):
                raise ModelError(f"{place} there is no layer {shown} here; {nearest_name(kind, SECTION_KEYS)}")
            sections.append(Section(kind, source, number))
        elif content:
            section = sections[-1]
            # Darknet removes all blanks from a line, so "45    61" is one number.
            key, equals, value = "".join(content.split()).partition("=")
            if not equals or not key:
                raise ModelError(f"{place} {shown} is neither [section] nor key=value", "put a list on one line")
            known = SECTION_KEYS.get(section.kind)  # None for [net], whose options count for nothing
            if known is not None and key not in known:
                raise ModelError(f"{place} [{section.kind}] has no option {key[:40]!r}; {nearest_name(key, known)}")
            # Of two equal keys the first counts, as in Darknet.
            section.options.setdefault(key, value)
            section.option_lines.setdefault(key, number)
    if not sections:
        raise ModelError(f"{source}:1: the file is empty, not a Darknet .cfg", "check the path")
    return Cfg(text, source, net=sections[0], layers=sections[1:])


def zoo_cfg(name: str) -> Cfg:
    """A network of the zoo, such as yolov3-spp. Raises ModelError for another name."""
    if name not in ZOO:
        raise ModelError(f"there is no model '{name}'", f"use one of {', '.join(ZOO)}, or the path of a .cfg")
    size = name.removeprefix("yolox-")
    if size in SIZES:
        return parse_cfg(yolox_cfg(size), f"{name}.cfg")
    return load_cfg(ZOO_FOLDER / f"{name}.cfg")


def nearest_name(name: str, names: Collection[str]) -> str:
    """A clause for messages: the name of which this is a slip of the pen, or all of them.

    Other words may compute something else, as hswish, prelu, relu1 and stride_x do.
    """
    for known in difflib.get_close_matches(name, names, cutoff=0.8):
        has_digit = re.search(r"\d", name + known)
        if known[0] == name[0] and abs(len(known) - len(name)) < 2 and not has_digit:
            return f"did you mean {known}?"
    return f"known are {', '.join(sorted(names))}"
