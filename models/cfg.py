"""Read Darknet .cfg files into typed sections; every complaint names the file and the line.

A .cfg is a list of sections, each a `[kind]` line followed by `key=value` lines. The first section is [net]; the
others are the layers, numbered from 0 in file order.
"""

import difflib
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from models.cfg_keys import NET, SECTION_ALIASES, SECTION_KEYS
from models.errors import ModelError

ZOO = Path(__file__).parent / "zoo"


@dataclass(frozen=True)
class Section:
    """One section of a .cfg: its kind, its options as written, and the line numbers for messages."""

    kind: str
    source: str
    line: int
    options: dict[str, str] = field(default_factory=dict)
    option_lines: dict[str, int] = field(default_factory=dict)

    def error(self, message: str, key: str | None = None) -> ModelError:
        """A ModelError that names the file and the line of `key`, or of the section where the key is not written."""
        line = self.line if key is None else self.option_lines.get(key, self.line)
        return ModelError(f"{self.source}:{line}: [{self.kind}] {message}")

    def text(self, key: str, default: str | None = None) -> str:
        """The value of `key`; without a default the key must be there."""
        value = self.options.get(key, default)
        if value is None:
            raise self.error(f"has no {key}. fix: add a line {key}=...")
        return value

    def integer(self, key: str, default: int | None = None, minimum: int | None = None) -> int:
        """The value of `key` as an int, at least `minimum`; without a default the key must be there."""
        value = _to_int(self, key, self.text(key, None if default is None else str(default)))
        if minimum is not None and value < minimum:
            raise self.error(f"{key} must be {minimum} or more, got {value}", key)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The value of `key` as a float; without a default the key must be there."""
        return _to_float(self, key, self.text(key, None if default is None else str(default)))

    def integers(self, key: str, default: list[int] | None = None) -> list[int]:
        """A comma-separated list of ints; a trailing comma is allowed, as Darknet allows it."""
        if key not in self.options and default is not None:
            return list(default)
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
    """A whole .cfg: the text as read, where it came from, the [net] section and the layers in file order."""

    text: str
    source: str
    net: Section
    layers: list[Section]


def load_cfg(path: str | Path) -> Cfg:
    """Read the .cfg file at `path`. Raises ModelError where it is missing or cannot be understood."""
    try:
        # Comments of published files are in many encodings; whatever matters is ASCII and checked by the parser.
        text = Path(path).read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        message = f"cannot read the cfg file {path} ({error.strerror}). fix: set model.cfg to a Darknet .cfg"
        raise ModelError(message) from error
    return parse_cfg(text, str(path))


def parse_cfg(text: str, source: str) -> Cfg:
    """Parse the text of a .cfg; `source` is the name that messages use. Raises ModelError."""
    sections: list[Section] = []
    for line_number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#")[0].split(";")[0].strip()
        if not content:
            continue
        if content.startswith("["):
            sections.append(_start_section(content, source, line_number))
        elif not sections:
            raise ModelError(f"{source}:{line_number}: '{content}' stands before any section. fix: begin with [{NET}]")
        else:
            _add_option(sections[-1], content, line_number)
    if not sections or sections[0].kind != NET:
        raise ModelError(f"{source} does not begin with [{NET}], so it is no Darknet .cfg. fix: check the path")
    if repeated := [section for section in sections[1:] if section.kind == NET]:
        raise repeated[0].error("is given twice. fix: keep one, a .cfg describes one network")
    return Cfg(text, source, net=sections[0], layers=sections[1:])


def zoo_cfg(name: str) -> Path:
    """The .cfg of the project's own model called `name`, as yolov3-spp. Raises ModelError that lists the names."""
    path = ZOO / f"{name}.cfg"
    names = sorted(path.stem for path in ZOO.glob("*.cfg"))
    if name not in names:
        raise ModelError(f"no model is called '{name}'. fix: use one of {', '.join(names)}, or give the path of a .cfg")
    return path


def nearest_name(name: str, known: Collection[str]) -> str:
    """A clause for messages: the known name that `name` may have been meant for, or the list of all."""
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"


def _start_section(content: str, source: str, line: int) -> Section:
    name = content.strip("[] \t").lower()
    kind = SECTION_ALIASES.get(name, name)
    if not content.endswith("]") or kind not in SECTION_KEYS:
        raise ModelError(f"{source}:{line}: no layer is written {content}; {nearest_name(kind, SECTION_KEYS)}")
    return Section(kind, source, line)


def _add_option(section: Section, content: str, line: int) -> None:
    key, equals, value = (part.strip() for part in content.partition("="))
    if not equals or not key:
        raise ModelError(f"{section.source}:{line}: '{content}' is neither a [section] nor a key=value line")
    known = SECTION_KEYS[section.kind].known
    if key not in known:
        raise ModelError(f"{section.source}:{line}: [{section.kind}] has no option {key}; {nearest_name(key, known)}")
    # Darknet takes the first of two equal keys, so this does too.
    section.options.setdefault(key, value)
    section.option_lines.setdefault(key, line)


def _to_int(section: Section, key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise section.error(f"{key} needs a whole number, got '{value}'", key) from None


def _to_float(section: Section, key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not abs(number) < float("inf"):  # also true for NaN
        raise section.error(f"{key} needs a number, got '{value}'", key)
    return number
