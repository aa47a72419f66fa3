"""Read a json file whose top level is an object of long lists, one list entry at a time.

20 million annotations are gigabytes of text, and several times that as Python objects. msgspec
hands over each entry of the mapped file as it comes, so they take only the memory of what the
caller keeps. Python's own parser finishes the few files that msgspec stops at without being broken.
"""

from __future__ import annotations

import json
import mmap
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import GenericAlias
from typing import Any

import msgspec

from data.errors import DataError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Python's json writes numbers that are not finite and half characters, which JSON does not have.
PYTHONIC = re.compile(rb"NaN|Infinity|\\u[dD][89a-fA-F]")


def read_lists(path: Path, take: Mapping[str, Callable[[Any], None]]) -> set[str]:
    """Call ``take[key]`` with each entry of the top-level list ``key``, in the order of the file.

    Returns the keys of ``take`` that are lists in the file; other values are ignored. Raises
    ``ValueError`` where the file is not json or has a list twice, and ``TypeError`` where its top
    level is not an object. ``DataError`` of ``take`` passes through.
    """
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    marked = mapped[: len(BYTE_ORDER_MARK)] == BYTE_ORDER_MARK
    text = memoryview(mapped)[len(BYTE_ORDER_MARK) if marked else 0 :]
    taken: Counter[str] = Counter()
    try:
        return _with_msgspec(text, take, taken)
    except msgspec.DecodeError as error:
        if isinstance(error.__cause__, DataError):
            raise error.__cause__ from None
        # Another type than expected may still be json; of malformed text Python reads its own only.
        if not isinstance(error, msgspec.ValidationError) and not PYTHONIC.search(text):
            raise
    return _with_python(text, take, taken)


def _with_msgspec(text: memoryview, take: Mapping[str, Callable[[Any], None]], taken: Counter[str]) -> set[str]:
    """Read all lists; ``taken`` counts the entries passed on."""
    kinds = {key: type(key, (), {}) for key in take}  # a type for the entries of each list
    placeholders = {kind: kind() for kind in kinds.values()}  # what msgspec's lists hold instead of entries

    def pass_on(kind: type, entry: Any) -> object:
        taken[kind.__name__] += 1
        take[kind.__name__](entry)
        return placeholders[kind]

    fields = [(key, GenericAlias(list, (kind,)) | msgspec.UnsetType, msgspec.UNSET) for key, kind in kinds.items()]
    content = msgspec.json.decode(text, type=msgspec.defstruct("Content", fields), dec_hook=pass_on)
    found = {key: getattr(content, key) for key in take if getattr(content, key) is not msgspec.UNSET}
    for key, entries in found.items():
        if len(entries) != taken[key]:  # only those of the last list
            raise ValueError(f"a second list of {key!r}")
    return set(found)


def _with_python(text: memoryview, take: Mapping[str, Callable[[Any], None]], taken: Counter[str]) -> set[str]:
    """Read the whole file, in memory, and pass on the entries after the ``taken`` ones."""

    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(key for key, _ in pairs if key in take)
        for key in counts:
            if counts[key] > 1:
                raise ValueError(f"a second list of {key!r}")
        return dict(pairs)

    content = json.loads(str(text, "utf-8"), object_pairs_hook=without_repeats)
    if not isinstance(content, dict):
        raise TypeError("the top level is not an object")
    found = {key for key in take if isinstance(content.get(key), list)}
    for key in found:
        for entry in content[key][taken[key] :]:
            take[key](entry)
    return found
