"""The pages that a program prints instead of running: ``--help`` and ``--version``.

The meanings are the comments beside the fields of the option dataclasses, the values those that
the rest of the command line gives. Neither page imports torch.
"""

from __future__ import annotations

import ast
import importlib.metadata
import platform
import shutil
import subprocess
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from conf.describe import Option, options_of, sections_in
from conf.entry import CONF_DIR, defaults
from conf.schema import CHOICES

REPOSITORY = CONF_DIR.parent
LIBRARIES = ("torch", "torchvision", "hydra-core", "numpy", "opencv-python-headless", "pycocotools", "hotcoco")
LEAST_WIDTH, MOST_WIDTH, KEY_WIDTH = 60, 120, 34
HELP_FLAGS = frozenset(("--help", "-h"))


def help_page(name: str, module: str, schema: type, arguments: Sequence[str]) -> str:
    """The help of ``conf/<name>.yaml``: groups with their choices, keys with value and meaning.

    Words of ``arguments`` without ``=`` choose: a section, or what is named or meant so.
    """
    words = [word.lower() for word in arguments if "=" not in word and not word.startswith("-")]
    values = defaults(name, schema, [word for word in arguments if "=" in word and not word.startswith("-")])
    command = f"{module}.py" if "." not in module else f"-m {module}"
    width = min(max(shutil.get_terminal_size().columns, LEAST_WIDTH), MOST_WIDTH)
    parts = [
        part
        for title, section, prefix in _sections(schema, values)
        if (part := _table(title, options_of(section, prefix), values, words, width))
    ]
    if words:
        return "\n\n".join(parts) or f"nothing is called or means {' '.join(words)}. fix: --help lists all options"
    head = f"{_description(module)}\n\nUsage: python {command} [group=choice ...] [key=value ...]"
    foot = [
        f"python {command} --help <word>    only the options of a section, or about a word",
        f"python {command} --cfg job ...    the values that a command line results in",
        "docs/options.md lists all options, docs/coming-from.md those of other programs",
    ]
    return "\n\n".join(filter(None, [head, _groups(schema, width), *parts, "\n".join(foot)]))


def version_page() -> str:
    """The versions of this project, of Python and of the libraries, and the commit."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [f"{project['name']} {project['version']} ({_commit()})", f"Python {platform.python_version()}"]
    return "\n".join([*lines, *(f"{library} {importlib.metadata.version(library)}" for library in LIBRARIES)])


def _commit() -> str:
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty=, with changes", "--exclude=*"]
    try:
        found = subprocess.run(command, check=False, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "no commit known"
    return f"commit {found.stdout.strip()}" if found.returncode == 0 else "no commit known"


def _description(module: str) -> str:
    """The docstring of a program, read without importing it."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    return ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""


def _groups(schema: type, width: int) -> str:
    """The groups of a program with their choices; "" if it has none."""
    lines = ["Groups, typed as group=choice"]
    for group in [*get_type_hints(schema), "experiment"]:
        choices = sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml") if path.stem != "base")
        if choices and (group != "experiment" or "train" in get_type_hints(schema)):
            lines += _wrapped(f"  {group}", ", ".join(choices), width)
    return "\n".join(lines) if len(lines) > 1 else ""


def _sections(schema: type, values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, type, str]]:
    """Title, dataclass and prefix of each section; where choices differ in keys, of the chosen."""
    yield " ".join((schema.__doc__ or "").replace("``", "").split("\n\n")[0].split()), schema, prefix
    for name, kind in get_type_hints(schema).items():
        there = values.get(name)
        there = there if isinstance(there, Mapping) else {}
        chosen = CHOICES.get(name, {}).get(str(there.get("name")), kind)
        for section in sections_in(chosen):
            named = f"<{'|'.join(there)}>." if get_origin(kind) is dict else ""
            yield from _sections(section, there, f"{prefix}{name}.{named}")


def _table(title: str, options: Sequence[Option], values: Mapping[str, Any], words: Sequence[str], width: int) -> str:
    """The options that all ``words`` are about, under their title; "" if there are none."""
    lines = []
    for option in options:
        text = f"{option.key} {option.meaning} {title}".lower()
        if all(word in text for word in words):
            value: Any = values
            for part in option.key.split("."):
                value = value.get(part, "???") if isinstance(value, Mapping) else "???"
            lines += _wrapped(f"  {option.key}={_shown(value)}", _meaning(option), width)
    return "\n".join([*textwrap.wrap(title, width), *lines]) if lines else ""


def _meaning(option: Option) -> str:
    """The comment and the type, with the values of a choice."""
    return f"{option.meaning} ({option.kind})" if option.meaning else f"({option.kind})"


def _shown(value: Any) -> str:
    words = {None: "null", True: "true", False: "false", "???": ""}
    return words[value] if isinstance(value, str | bool | None) and value in words else str(value)


def _wrapped(left: str, right: str, width: int) -> list[str]:
    """Two columns; a long left one has a line of its own."""
    lines = textwrap.wrap(right, width - KEY_WIDTH, break_on_hyphens=False) or [""]
    first = [f"{left:<{KEY_WIDTH}}{lines[0]}"] if len(left) < KEY_WIDTH else [left, f"{'':{KEY_WIDTH}}{lines[0]}"]
    return [*first, *(f"{'':{KEY_WIDTH}}{line}" for line in lines[1:])]
