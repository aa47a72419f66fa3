"""Read a json file whose top level is an object of long lists, one list entry at a time.

20 million annotations are gigabytes of text, and several times that as Python objects. Read entry
by entry, they take only the memory of what the caller keeps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TextIO

CHUNK = 1 << 22  # characters read at once, more where a single value is longer
BLANKS = " \t\n\r"
NUMBER = "0123456789.eE+-"


def stream_lists(path: Path, take: Mapping[str, Callable[[Any], None]]) -> set[str]:
    """Call ``take[key]`` with each entry of the top-level list ``key``, in the order of the file.

    Returns the keys of ``take`` that are lists in the file; other values are ignored. Raises
    ``json.JSONDecodeError`` or ``UnicodeDecodeError`` where the file is no json or has a list
    twice, and ``TypeError`` where its top level is no object.
    """
    with path.open(encoding="utf-8-sig") as file:
        reader = _Reader(file)
        if reader.peek() != "{":
            reader.value()
            reader.end()
            raise TypeError("the top level is no object")
        reader.skip("{")
        found: set[str] = set()
        if reader.peek() != "}":
            _pair(reader, take, found)
        while reader.peek() == ",":
            reader.skip(",")
            _pair(reader, take, found)
        reader.skip("}")
        reader.end()
    return found


def _pair(reader: _Reader, take: Mapping[str, Callable[[Any], None]], found: set[str]) -> None:
    """Read one key of the top level and its value."""
    key = reader.key()
    reader.skip(":")
    if reader.peek() != "[":
        reader.value()
    elif key not in take:
        reader.entries(_drop)
    elif key in found:
        reader.fail(f"A second list of {key!r}")
    else:
        found.add(key)
        reader.entries(take[key])


def _drop(_: Any) -> None:
    pass


class _Reader:
    """A window of the file's text and a position in it."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._text = ""
        self._position = 0
        self._before = 0  # characters before the window
        self._at_end = False
        self._decode = json.JSONDecoder().raw_decode

    def peek(self) -> str:
        """The next non-blank character; empty at the end of the file."""
        while True:
            text, position = self._text, self._position
            while position < len(text) and text[position] in BLANKS:
                position += 1
            self._position = position
            if position < len(text):
                return text[position]
            if not self._more(CHUNK):
                return ""

    def skip(self, character: str) -> None:
        """Skip a character that must come next."""
        if self.peek() != character:
            self.fail(f"Expecting '{character}'")
        self._position += 1

    def key(self) -> str:
        """Read a key of the top-level object."""
        if self.peek() != '"':
            self.fail("Expecting property name enclosed in double quotes")
        key = self.value()
        assert isinstance(key, str)
        return key

    def value(self) -> Any:
        """Read the next value."""
        self.peek()
        size = CHUNK
        while True:
            try:
                value, end = self._decode(self._text, self._position)
            except json.JSONDecodeError as error:
                if self._more(size):
                    size *= 2
                    continue
                self.fail(error.msg, error.pos)
            # A number at the end of the window may continue.
            if (end < len(self._text) and self._text[end] not in NUMBER) or not self._more(CHUNK):
                self._position = end
                return value

    def entries(self, handle: Callable[[Any], None]) -> None:
        """Call ``handle`` with each entry of the list that comes next."""
        self.skip("[")
        if self.peek() == "]":
            self._position += 1
            return
        decode = self._decode
        while True:
            # The fast path: the entry and the character behind it lie in the window.
            try:
                value, position = decode(self._text, self._position)
                if self._text[position] not in ",]":
                    raise IndexError
                self._position = position
            except (json.JSONDecodeError, IndexError):
                value = self.value()
            handle(value)
            following = self.peek()
            if following not in (",", "]"):
                self.fail("Expecting ',' delimiter")
            self._position += 1
            if following == "]":
                return
            self.peek()

    def end(self) -> None:
        """Check that only blanks are left."""
        if self.peek():
            self.fail("Extra data")

    def _more(self, size: int) -> bool:
        """Drop the text before the position and read on; False at the end of the file."""
        if self._at_end:
            return False
        chunk = self._file.read(size)
        self._before += self._position
        self._text = self._text[self._position :] + chunk
        self._position = 0
        self._at_end = not chunk
        return bool(chunk)

    def fail(self, message: str, position: int | None = None) -> NoReturn:
        """Raise an error at a position in the window, by default the current one."""
        place = self._position if position is None else position
        what = message.removesuffix(" at")  # "Unterminated string starting at"
        raise json.JSONDecodeError(f"{what} at character {self._before + place} of the file", self._text, place)
