"""Read Darknet .cfg files into typed sections. Every error names the file and the line.

A .cfg is a list of sections, each a `[kind]` line followed by `key=value` lines. The first section
is [net]; the others are the layers, numbered from 0 in file order.

There are three kinds of options. Some shape the network; sections.py reads them. Some only steer
Darknet's own training or display and have no effect here. Some are not supported and must be 0.
Any other option might change what the network computes, so it is refused, never skipped.
"""

import codecs
import difflib
import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from models.errors import ModelError

ZOO = Path(__file__).parent / "zoo"
LARGEST = 2**31 - 1  # Darknet's integers have 32 bits
# A .cfg larger than this, some twenty times the largest published one, is refused.
MAX_CHARACTERS = 1_000_000
MAX_LAYERS = 5_000
MAX_LISTED = 50  # names in a message
INTEGER = re.compile(r"[+-]?[0-9]+")
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


@dataclass(frozen=True)
class SectionKeys:
    """Option names of one kind of section: read, without effect here, and not supported."""

    used: frozenset[str]
    ignored: frozenset[str] = frozenset()
    unbuilt: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """All keys that Darknet reads in this kind of section."""
        return self.used | self.ignored | self.unbuilt


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


NET = "net"

_TRACKER = "belongs to a tracker that learns from sequences of frames, and this project detects in single images"
_OTHER_DETECTOR = "is the head of another detector. fix: use a .cfg with [yolo] sections"
_CLASSIFIER = "belongs to a classifier, and this project builds detectors. fix: use a .cfg with [yolo] sections"

# Sections of Darknet that this project does not build, with the reason.
REFUSED_SECTIONS = {
    **dict.fromkeys(("crnn", "rnn", "lstm", "conv_lstm", "gru", "contrastive", "history"), _TRACKER),
    **dict.fromkeys(("region", "detection", "gaussian_yolo", "iseg", "detect"), _OTHER_DETECTOR),
    **dict.fromkeys(("softmax", "cost", "connected", "crop", "local"), _CLASSIFIER),
}

# Every layer may have these; they steer only Darknet's training.
_TRAINING = _names("stopbackward onlyforward dont_update burnin_update train_only_bn clip learning_rate")

# These skip parts of a .weights file, so the rest would no longer line up.
_LOADING = _names("dontload dontloadscales")

_WINDOW = "size stride stride_x stride_y padding"


def layer_keys(used: str, ignored: str = "", unbuilt: str = "") -> SectionKeys:
    """The keys of a layer: its own, and those that every layer may have."""
    return SectionKeys(_names(used), _names(ignored) | _TRAINING, _names(unbuilt) | _LOADING)


SECTION_KEYS = {
    NET: SectionKeys(
        used=_names("width height channels"),
        ignored=_names(
            # optimiser and schedule
            "batch subdivisions momentum decay learning_rate learning_rate_min burn_in max_batches policy power step"
            " scale steps scales gamma adam B1 B2 eps loss_scale ema_alpha batches_per_cycle batches_cycle_mult"
            " sgdr_cycle sgdr_mult dynamic_minibatch resize_step label_smooth_eps try_fix_nan seq_scales"
            # augmentation
            " angle aspect saturation exposure hue flip blur gaussian_noise mixup cutmix mosaic mosaic_bound letter_box"
            " max_crop min_crop crop adversarial_lr attention contrastive contrastive_jit_flip contrastive_color"
            " augment_speed track time_steps sequential_subdivisions unsupervised"
            # bookkeeping and display
            " optimized_memory workspace_size_limit_MB show_receptive_field max_chart_loss benchmark_layers"
            " use_cuda_graph weights_reject_freq equidistant_point num_sigmas_reject_badlabels"
            " badlabels_rejection_percentage badlabels_reject_threshold inputs notruth random"
        ),
    ),
    "convolutional": layer_keys(
        "filters size stride stride_x stride_y pad padding dilation groups batch_normalize cbn activation share_index"
        " xnor antialiasing",
        ignored="grad_centr bin_output binary assisted_excitation angle stream wait_stream",
        unbuilt="flipped dot reverse coordconv sway rotate stretch stretch_sway",
    ),
    "shortcut": layer_keys("from activation weights_type weights_normalization"),
    "route": layer_keys("layers groups group_id", ignored="stream wait_stream"),
    "upsample": layer_keys("stride scale"),
    "maxpool": layer_keys(f"{_WINDOW} maxpool_depth out_channels antialiasing", ignored="maxpool_zero_nonmax"),
    "local_avgpool": layer_keys(_WINDOW),
    "avgpool": layer_keys(""),
    "sam": layer_keys("from activation"),
    "scale_channels": layer_keys("from activation", unbuilt="scale_wh"),
    "dropout": layer_keys("probability dropblock dropblock_size_rel dropblock_size_abs"),
    "reorg": layer_keys("stride", unbuilt="reverse"),
    "reorg3d": layer_keys("stride", unbuilt="reverse"),
    "yolo": layer_keys(
        "mask anchors num classes scale_x_y new_coords iou_loss iou_normalizer cls_normalizer obj_normalizer"
        " ignore_thresh truth_thresh iou_thresh label_smooth_eps",
        ignored="jitter resize random iou_thresh_kind uc_normalizer delta_normalizer nms_kind beta_nms beta1"
        " objectness_smooth max_delta focal_loss counters_per_class max map show_details thresh"
        " embedding_layer track_history_size sim_thresh dets_for_show dets_for_track track_ciou_norm",
    ),
}

# Darknet's synonyms for section names.
SECTION_ALIASES = {
    "network": NET,
    "conv": "convolutional",
    "max": "maxpool",
    "avg": "avgpool",
    "local_avg": "local_avgpool",
    "drop": "dropout",
    "soft": "softmax",
    "conn": "connected",
}


@dataclass(frozen=True)
class Section:
    """One section of a .cfg: its kind, its options as written, and their lines for messages."""

    kind: str
    source: str
    line: int
    options: dict[str, str] = field(default_factory=dict)
    option_lines: dict[str, int] = field(default_factory=dict)

    def error(self, message: str, key: str | None = None) -> ModelError:
        """A ModelError with the file and the line of `key`, or of the section without that key."""
        line = self.line if key is None else self.option_lines.get(key, self.line)
        return ModelError(f"{self.source}:{line}: [{self.kind}] {_printable(message)}")

    def text(self, key: str, default: str | None = None) -> str:
        """The value of `key`, which is required if there is no default."""
        value = self.options.get(key, default)
        if value is None:
            raise self.error(f"has no {key}. fix: add a line {key}=...")
        return value

    def integer(self, key: str, default: int | None = None, minimum: int = -LARGEST, maximum: int = LARGEST) -> int:
        """`key` as an int from `minimum` to `maximum`, required if there is no default."""
        value = _to_int(self, key, self.text(key, None if default is None else str(default)))
        self._check_range(key, value, minimum, maximum)
        return value

    def choice(self, key: str, default: str, choices: Collection[str]) -> str:
        """The value of `key`, one of `choices`."""
        value = self.text(key, default)
        if value not in choices:
            raise self.error(f"has no {key} {_shortened(value)}; {nearest_name(value, choices)}", key)
        return value

    def number(
        self, key: str, default: float | None = None, minimum: float = -math.inf, maximum: float = math.inf
    ) -> float:
        """`key` as a float from `minimum` to `maximum`, required if there is no default."""
        value = _to_float(self, key, self.text(key, None if default is None else str(default)))
        self._check_range(key, value, minimum, maximum)
        return value

    def _check_range(self, key: str, value: float, minimum: float, maximum: float) -> None:
        if value < minimum:
            raise self.error(f"{key} must be {minimum} or more, got {value}", key)
        if value > maximum:
            raise self.error(f"{key} must be {maximum} or less, got {value}", key)

    def integers(self, key: str) -> list[int]:
        """A comma-separated list of ints. A trailing comma is allowed, as in Darknet."""
        return [_to_int(self, key, item) for item in self._items(key)]

    def numbers(self, key: str) -> list[float]:
        """A comma-separated list of floats."""
        return [_to_float(self, key, item) for item in self._items(key)]

    def _items(self, key: str) -> list[str]:
        items = [item for item in map(str.strip, self.text(key).split(",")) if item]
        if not items:
            raise self.error(f"{key} is empty. fix: give numbers separated by commas", key)
        return items


@dataclass(frozen=True)
class Cfg:
    """A whole .cfg: its text and source, the [net] section, and the layers in file order."""

    text: str
    source: str
    net: Section
    layers: list[Section]


def load_cfg(path: str | Path) -> Cfg:
    """Read the .cfg file at `path`. Raises ModelError if it is missing or invalid."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(4 * MAX_CHARACTERS + 4)
    except OSError as error:
        message = f"cannot read the cfg file {path} ({error.strerror}). fix: set model.cfg to a Darknet .cfg"
        raise ModelError(message) from error
    text = _decoded(data)
    if len(text) > MAX_CHARACTERS:
        raise ModelError(
            f"{path} has more than {MAX_CHARACTERS:,} characters, so it is not a .cfg. fix: check the path"
        )
    return parse_cfg(text, str(path))


def image_size_of(cfg: Cfg) -> int:
    """The side in pixels of the square images that a .cfg was made for.

    Raises ModelError if its [net] section has no size or another shape.
    """
    height, width = (cfg.net.integer(key, minimum=1) for key in ("height", "width"))
    if height != width:
        raise cfg.net.error(f"is for images of {width}x{height}, not a square. fix: set evaluate.image_size", "width")
    return width


def _decoded(data: bytes) -> str:
    """Decode a .cfg as UTF-8, or as UTF-16 (Windows tools write it) if its first bytes say so.

    Comments of published files use many encodings. Everything else is ASCII, as the parser checks.
    """
    if data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        text = data.decode("utf-16", errors="replace")
    elif data[:2].count(0) == 1:  # UTF-16 "[" or "#" without a mark
        text = data.decode("utf-16-be" if data[0] == 0 else "utf-16-le", errors="replace")
    else:
        text = data.decode("utf-8-sig", errors="replace")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def parse_cfg(text: str, source: str) -> Cfg:
    """Parse the text of a .cfg. `source` names it in messages. Raises ModelError."""
    sections: list[Section] = []
    # Not splitlines, which also splits at form feeds and the like; comments may hold those.
    for line_number, line in enumerate(text.split("\n"), start=1):
        content = line.split("#")[0].split(";")[0].strip()
        if not content:
            continue
        if content.startswith("["):
            sections.append(_start_section(content, source, line_number))
        elif not sections:
            raise ModelError(
                f"{source}:{line_number}: '{_shortened(content)}' comes before any section. fix: begin with [{NET}]"
            )
        else:
            _add_option(sections[-1], content, line_number)
    if not sections:
        raise ModelError(f"{source}:1: does not begin with [{NET}], so it is not a Darknet .cfg. fix: check the path")
    if sections[0].kind != NET:
        raise sections[0].error(f"is the first section, not [{NET}]. fix: begin with [{NET}], or check the path")
    if repeated := [section for section in sections[1:] if section.kind == NET]:
        raise repeated[0].error("appears twice. fix: keep one, because a .cfg describes one network")
    if len(layers := sections[1:]) > MAX_LAYERS:
        raise layers[MAX_LAYERS].error(f"exceeds the limit of {MAX_LAYERS:,} layers. fix: check the file")
    return Cfg(text, source, net=sections[0], layers=layers)


def zoo_cfg(name: str) -> Path:
    """The .cfg of a model in the zoo, such as yolov3-spp. A ModelError lists the names."""
    path = ZOO / f"{name}.cfg"
    names = sorted(path.stem for path in ZOO.glob("*.cfg"))
    if name not in names:
        raise ModelError(f"there is no model '{name}'. fix: use one of {', '.join(names)}, or the path of a .cfg")
    return path


def nearest_name(name: str, names: Collection[str]) -> str:
    """A clause for messages: the closest of the names, or all of them if they are few."""
    if close := difflib.get_close_matches(name[:40], sorted(names), n=1):
        return f"did you mean {close[0]}?"
    return f"known are {', '.join(sorted(names))}" if len(names) <= MAX_LISTED else "fix: leave it out"


def _start_section(content: str, source: str, line: int) -> Section:
    name = content.strip("[] \t")
    kind = SECTION_ALIASES.get(name.lower(), name.lower())
    if kind in REFUSED_SECTIONS:
        raise ModelError(f"{source}:{line}: [{name}] {REFUSED_SECTIONS[kind]}")
    if not content.endswith("]") or kind not in SECTION_KEYS:
        nearest = nearest_name(kind, SECTION_KEYS)
        raise ModelError(f"{source}:{line}: there is no layer {_shortened(content)}; {nearest}")
    return Section(kind, source, line)


def _add_option(section: Section, content: str, line: int) -> None:
    key, equals, value = content.partition("=")
    # Darknet removes all blanks from a line, so "45    61" is one number.
    key, value = "".join(key.split()), "".join(value.split())
    if not equals or not key:
        raise ModelError(
            f"{section.source}:{line}: '{_shortened(content)}' is neither a [section] nor a key=value line"
        )
    keys = SECTION_KEYS[section.kind]
    if key not in keys.names:
        nearest = nearest_name(key, keys.names)
        raise ModelError(f"{section.source}:{line}: [{section.kind}] has no option {_shortened(key)}; {nearest}")
    if key in keys.unbuilt and value != "0":
        raise ModelError(
            f"{section.source}:{line}: [{section.kind}] has {key}={_shortened(value)}, which is not supported."
            " fix: use a .cfg without it"
        )
    # Of two equal keys the first counts, as in Darknet.
    section.options.setdefault(key, value)
    section.option_lines.setdefault(key, line)


def with_options(text: str, changes: Iterable[tuple[Section, str, str]]) -> str:
    """Set each (section, key, value), on the key's line or on a new one at the section's top."""
    lines = text.split("\n")  # as the parser counts them
    edits = [
        (section.option_lines.get(key, section.line), key in section.option_lines, f"{key}={value}")
        for section, key, value in changes
    ]
    for number, replaces, line in sorted(edits, reverse=True):  # from the end, so that earlier line numbers stay valid
        lines[number - 1 if replaces else number : number] = [line]
    return "\n".join(lines)


def _to_int(section: Section, key: str, value: str) -> int:
    if not INTEGER.fullmatch(value):
        raise section.error(f"{key} needs a whole number, got '{_shortened(value)}'", key)
    # Python refuses to convert more than a few thousand digits.
    if len(value) > 40 or abs(number := int(value)) > LARGEST:
        raise section.error(f"{key} is out of range: {_shortened(value)}", key)
    return number


def _to_float(section: Section, key: str, value: str) -> float:
    # An exponent may make it infinite.
    if not NUMBER.fullmatch(value) or not abs(number := float(value)) < float("inf"):
        raise section.error(f"{key} needs a number, got '{_shortened(value)}'", key)
    return number


def _shortened(value: str) -> str:
    return _printable(value if len(value) <= 40 else f"{value[:40]}...")


def _printable(text: str) -> str:
    """The text with question marks for characters that break a line or control a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)
