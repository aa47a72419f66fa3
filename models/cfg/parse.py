"""Read Darknet .cfg files into typed sections. Every error names the file and the line.

A .cfg is a list of sections, each a `[kind]` line followed by `key=value` lines. The first section
is [net]; the others are the layers, numbered from 0 in file order.
"""

import codecs
import difflib
import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from models.cfg.keys import NET, REFUSED_SECTIONS, SECTION_ALIASES, SECTION_KEYS
from models.errors import ModelError

ZOO = Path(__file__).parents[1] / "zoo"
LARGEST = 2**31 - 1  # Darknet's integers have 32 bits
# A .cfg larger than this, some twenty times the largest published one, is refused.
MAX_CHARACTERS = 1_000_000
MAX_LAYERS = 5_000
MAX_LISTED = 50  # names in a message
INTEGER = re.compile(r"[+-]?[0-9]+")
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


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


def nearest_name(name: str, known: Collection[str]) -> str:
    """A clause for messages: the known name closest to `name`, or all of them if they are few."""
    if close := difflib.get_close_matches(name[:40], sorted(known), n=1):
        return f"did you mean {close[0]}?"
    return f"known are {', '.join(sorted(known))}" if len(known) <= MAX_LISTED else "fix: leave it out"


def _start_section(content: str, source: str, line: int) -> Section:
    name = content.strip("[] \t")
    kind = SECTION_ALIASES.get(name.lower(), name.lower())
    if kind in REFUSED_SECTIONS:
        raise ModelError(f"{source}:{line}: [{name}] {REFUSED_SECTIONS[kind]}")
    if not content.endswith("]") or kind not in SECTION_KEYS:
        known = nearest_name(kind, SECTION_KEYS)
        raise ModelError(f"{source}:{line}: there is no layer {_shortened(content)}; {known}")
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
    if key not in keys.known:
        nearest = nearest_name(key, keys.known)
        raise ModelError(f"{section.source}:{line}: [{section.kind}] has no option {_shortened(key)}; {nearest}")
    if key in keys.unbuilt and value != "0":
        raise ModelError(
            f"{section.source}:{line}: [{section.kind}] has {key}={_shortened(value)}, which is not supported."
            " fix: use a .cfg without it"
        )
    # Of two equal keys the first counts, as in Darknet.
    section.options.setdefault(key, value)
    section.option_lines.setdefault(key, line)


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
