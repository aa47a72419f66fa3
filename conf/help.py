"""The pages that a program prints instead of running: ``--help`` and ``--version``.

The meaning of an option is the comment beside its field in the dataclass, its value what the rest
of the command line gives. Neither page imports torch.
"""

from __future__ import annotations

import ast
import inspect
import io
import platform
import shutil
import subprocess
import textwrap
import tokenize
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from conf import CONF_DIR, REPOSITORY
from conf.entry import defaults, with_search_path
from conf.schema import CHOICES, PluggedConfig

PACKAGES = ("torch", "torchvision", "hydra-core", "numpy", "opencv-python-headless", "hotcoco")
MORE = {"data": ", or the path of a data set"}
LEAST_WIDTH, MOST_WIDTH, KEY_WIDTH = 60, 120, 34


def page_instead(name: str, command: str, schema: type, arguments: Sequence[str]) -> str:
    """The page that ``arguments`` ask for instead of a run; "" if they ask for none.

    ``name`` is that of the YAML file in conf/, ``command`` as in ``Program.command``.
    """
    if "--version" in arguments:
        return version_page()
    if not {"--help", "-h"} & set(arguments):
        return ""
    overrides = [word for word in with_search_path(arguments) if "=" in word and not word.startswith("-")]
    width = min(max(shutil.get_terminal_size().columns, LEAST_WIDTH), MOST_WIDTH)
    values = defaults(name, schema, overrides)
    described = _description(command.removesuffix(".py"))
    command = command if command.endswith(".py") else f"-m {command}"
    groups = _groups(schema, width)
    parts = [
        f"{described}\n\nUsage: python {command}{' [group=choice ...]' if groups else ''} [key=value ...]",
        groups,
        *(_table(*section, width) for section in _sections(schema, values)),
        f"python {command} --cfg job ...    the values that a command line results in\n"
        f"python {command} --version        the versions of this project, torch and more, and the commit\n"
        "docs/train/options.md lists all options, docs/coming-from.md those of other programs",
    ]
    return "\n\n".join(filter(None, parts))


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


def _description(module: str) -> str:
    """The docstring of a program, read without importing it."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    return ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""


def _groups(schema: type, width: int) -> str:
    """The groups of a program with their choices; "" if it has none."""
    names = get_type_hints(schema)
    choices = {name: sorted(file.stem for file in (CONF_DIR / name).glob("*.yaml")) for name in names}
    lines = [
        line
        for name, files in choices.items()
        if files
        for line in _columns(
            f"  {name}", ", ".join(file for file in files if file != "base") + MORE.get(name, ""), width
        )
    ]
    if "train" in names:
        for file in sorted((CONF_DIR / "experiment").glob("*.yaml")):
            about = file.read_text(encoding="utf-8").splitlines()[1].lstrip("# ")  # below Hydra's @package
            lines += _columns(f"  experiment={file.stem}", about, width)
        lines += _columns("  experiment=<file>", "A YAML file of your own", width)
    return "\n".join(["Groups, typed as group=choice", *lines]) if lines else ""


def _sections(
    schema: type, values: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[type, Mapping[str, Any], str]]:
    """Dataclass, values and prefix of each section; where choices differ in keys, of the chosen."""
    yield schema, values, prefix
    for name, kind in get_type_hints(schema).items():
        there = values.get(name)
        there = there if isinstance(there, Mapping) else {}
        for section in sections_in(CHOICES.get(name, {}).get(str(there.get("name")), kind)):
            yield from _sections(section, there, f"{prefix}{name}.")


def _table(section: type, values: Mapping[str, Any], prefix: str, width: int) -> str:
    """What a section is about, and its options with value and meaning; "" without options."""
    title = " ".join((section.__doc__ or "").replace("``", "").split("\n\n")[0].split())
    lines = _rows(section, values, prefix, width)
    return "\n".join([*textwrap.wrap(title, width), *lines]) if lines else ""


def _rows(section: type, values: Mapping[str, Any], prefix: str, width: int) -> list[str]:
    lines = []
    for option in options_of(section, prefix):
        value = values.get(option.key.removeprefix(prefix), "???")
        left = f"  {option.key}={'' if value == '???' else shown(value)}"
        lines += _columns(left, f"{option.meaning} ({option.kind})".lstrip(), width)
    return lines


def _columns(left: str, right: str, width: int) -> list[str]:
    """Two columns; a long left one has a line of its own."""
    indent = " " * KEY_WIDTH
    first = f"{left:<{KEY_WIDTH}}" if len(left) < KEY_WIDTH else f"{left}\n{indent}"
    return [first + textwrap.fill(right, width - KEY_WIDTH, break_on_hyphens=False).replace("\n", f"\n{indent}")]


@dataclass(frozen=True)
class Option:
    """One key as typed on the command line."""

    key: str
    kind: str  # its type in words, or its possible values
    meaning: str  # a sentence or two; empty if the name is enough


def options_of(schema: type, prefix: str = "") -> list[Option]:
    """The options of a dataclass in order, without those of its sections.

    Those that the programs share come last.
    """
    kinds, meanings = get_type_hints(schema), comments_of(schema)
    shared = {field.name for field in fields(PluggedConfig)}
    return [
        Option(prefix + field.name, kind_in_words(kinds[field.name]), meanings.get(field.name, ""))
        for field in sorted(fields(schema), key=lambda field: field.name in shared)
        if not sections_in(kinds[field.name]) and field.name not in CHOICES
    ]


def sections_in(kind: Any) -> list[type]:
    """The option dataclasses that a type hint names."""
    return [part for part in (kind, *get_args(kind)) if is_dataclass(part) and isinstance(part, type)]


def comments_of(schema: type) -> dict[str, str]:
    """The comment beside each field, with the comment lines that continue it."""
    comments: dict[str, str] = {}
    for part in reversed(schema.__mro__[:-1]):
        field, last_line = "", 0
        for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(part)).readline):
            if token.type == tokenize.NAME and token.start[1] == 4 and token.string in part.__annotations__:
                field, last_line = token.string, token.start[0]
            elif token.type == tokenize.COMMENT and field and token.start[0] - last_line <= 1:
                last_line = token.start[0]
                comments[field] = f"{comments.get(field, '')} {token.string.lstrip('# ')}".strip()
    return comments


def kind_in_words(kind: Any) -> str:
    """A type hint in words: ``number or null``, ``auto, cpu, cuda``."""
    if kind is Any:
        return "any"
    if get_origin(kind) is UnionType or type(None) in get_args(kind):
        return " or ".join("null" if part is type(None) else kind_in_words(part) for part in get_args(kind))
    if get_origin(kind) is list:
        return f"list of {kind_in_words(get_args(kind)[0])}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(member.name for member in kind)
    words = {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}
    name: str = kind.__name__
    return words.get(name, name)


def shown(value: Any) -> str:
    """A value as a user types it; ``-`` for a missing one."""
    words = {None: "null", True: "true", False: "false", "???": "-"}
    return words[value] if isinstance(value, str | bool | None) and value in words else str(value)
