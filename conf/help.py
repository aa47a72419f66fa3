"""What ``--help`` and ``--version`` print. Neither imports torch.

The meaning of an option is the comment beside its field in the dataclass, its value what the rest
of the command line gives.
"""

import ast
import inspect
import platform
import re
import shutil
import subprocess
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from importlib.metadata import version
from typing import Any, NamedTuple, get_args, get_type_hints

from conf import REPOSITORY, entry, messages
from conf.schema import CHOICES

KINDS = {str: "text", int: "integer", float: "number", bool: "true or false", Any: "any", type(None): "null"}
PACKAGES = ("torch", "torchvision", "hydra-core", "numpy", "opencv-python-headless", "hotcoco")


class Option(NamedTuple):
    """One key as typed on the command line."""

    key: str
    kind: str  # its type in words, or its possible values
    value: str
    meaning: str


def help_page(name: str, command: str, schema: type, arguments: Sequence[str]) -> str:
    """The docstring of a program, its groups, and its options with the values of ``arguments``.

    ``name`` is that of the YAML file in conf/, ``command`` as in ``Program.command``.
    """
    width = min(max(shutil.get_terminal_size().columns, 60), 120)

    def row(left: str, right: str) -> str:
        return textwrap.fill(right, width, initial_indent=f"  {left:<30}  ", subsequent_indent=" " * 34)

    file = REPOSITORY / f"{command.removesuffix('.py').replace('.', '/')}.py"
    parts = [ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""]
    groups = [*get_type_hints(schema), *(["experiment"] if name == "train" else [])]
    rows = [row(group, ", ".join(choices)) for group in groups if (choices := messages.choices_of(group))]
    parts += ["\nGroups, typed as group=choice; data and experiment take paths, too", *rows] if rows else []
    values = entry.defaults(name, schema, [word for word in arguments if "=" in word])
    for section, options in sections(schema, values):
        parts.append(f"\n{' '.join((section.__doc__ or '').partition(chr(10) * 2)[0].split())}")
        parts += [row(f"{option.key}={option.value}", f"{option.meaning} ({option.kind})") for option in options]
    parts.append("\ndocs/train/options.md lists all options, docs/coming-from.md those of other programs")
    return "\n".join(parts)


def version_page() -> str:
    """The versions of this project, its libraries and Python, and the commit where there is one."""
    lines = [own_version(), *(f"{package} {version(package)}" for package in PACKAGES)]
    lines.append(f"Python {platform.python_version()}")
    here = ["git", "-C", str(REPOSITORY), "--git-dir=.git"]  # not a repository around an unpacked archive
    command = [*here, "describe", "--always", "--dirty=, with changes", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):  # no git, no repository, or a disk that does not answer
        commit = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
        lines.append(f"commit {commit}")
    return "\n".join(lines)


def own_version() -> str:
    """Name and version of this project, which is used from a clone and not installed."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return f"{project['name']} {project['version']}"


def sections(schema: type, values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[type, list[Option]]]:
    """Each section with its options; of a section with choices, those of the chosen."""
    kinds, meanings = get_type_hints(schema), meanings_of(schema)
    parts = {field.name: messages.section_of(kinds[field.name]) for field in fields(schema)}
    yield (
        schema,
        [
            Option(
                f"{prefix}{name}", kind_in_words(kinds[name]), shown(values.get(name, "???")), meanings.get(name, "")
            )
            for name, part in parts.items()
            if part is None
        ],
    )
    for name, part in parts.items():
        if part is not None:
            there = values.get(name)
            inner: Mapping[str, Any] = there if isinstance(there, Mapping) else {}  # null or ???: nothing chosen
            chosen = CHOICES.get(name, {}).get(inner.get("name", ""), part)
            yield from sections(chosen, inner, f"{prefix}{name}.")


def meanings_of(schema: type) -> dict[str, str]:
    """The comment beside each field, with the comment lines that continue it."""
    comments: dict[str, str] = {}
    for part in reversed(schema.__mro__[:-1]):
        field = ""
        for line in inspect.getsource(part).splitlines():
            if beside := re.match(r"    (\w+): [^#]*#? ?(.*)", line):
                field = beside[1]
                comments[field] = beside[2]
            elif field and (below := re.match(r"    # (.*)", line)):
                comments[field] += f" {below[1]}"
            else:
                field = ""
    return comments


def kind_in_words(kind: Any) -> str:
    """A type hint in words: ``number or null``, ``auto, cpu, cuda``."""
    if parts := get_args(kind):
        return f"{'list of ' if len(parts) == 1 else ''}{' or '.join(map(kind_in_words, parts))}"
    if members := getattr(kind, "__members__", None):
        return ", ".join(members)
    return KINDS.get(kind) or str(kind.__name__)


def shown(value: Any) -> str:
    """A value as a user types it; ``-`` for a missing one."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    return "-" if value == "???" else str(value)
