"""One sentence for what Hydra, OmegaConf or a part of the program found wrong."""

from __future__ import annotations

import os.path
import re
import shlex
import traceback
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any, get_args, get_type_hints

import omegaconf.omegaconf
from hydra.errors import OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from conf.answers.suggest import kinds_of, near_choice, near_value, option_of_file, suggest
from data.formats.recognise import KINDS
from train_utils.shell import option, quoted


def explain(error: Exception, schema: Any) -> str:
    """One sentence for what Hydra or OmegaConf found wrong."""
    text = str(error)
    cause = error.__cause__
    if isinstance(error, OverrideParseException):
        key, equals, value = str(error.override).partition("=")
        meant = option_of_file(key, value, kinds_of(schema))
        if value[:1] + value[-1:] == "[]":
            plainly = shlex.quote(f"{key}=[{','.join(quoted(each) for each in value[1:-1].split(','))}]")
        else:
            plainly = option(key, os.path.expanduser(value)) if equals else "'data.root=\"/my data/a=b\"'"
        example = meant or plainly
        return (
            f"cannot read the option {error.override}. fix: write key=value, and quote a value that holds "
            f"any of = , # {{ [ ~ or letters like ü, as in {example}"
        )
    override = re.search(r"Could not override '([^']+)'", text)
    if override:
        given = re.search(rf"use \+{re.escape(override[1])}=(.*)", text)
        return f"no option {override[1]}; {suggest(override[1], given and given[1], schema)}"
    deleted = re.search(r"Could not delete from config. '([^']+)' does not exist", text)
    if deleted:
        return f"no option {deleted[1]}; {suggest(deleted[1], None, schema)}"
    choice = re.search(r"Could not find '((?:hydra/)?[^/]+)/(.+)'$", text, flags=re.MULTILINE)
    if choice:
        group, name = choice.groups()
        options = re.findall(r"^\t(?!base$)(\S+)$", text, flags=re.MULTILINE)
        return _no_choice(group, name, options, schema)
    stray = re.match(r"Key '([^']+)' not in", text)
    if stray:
        key = str(getattr(error, "full_key", None) or stray[1])
        return f"no option {key}; {suggest(key, None, schema)}"
    details = cause if isinstance(cause, OmegaConfBaseException) else error
    full_key = getattr(details, "full_key", None)
    first_line = (str(details).splitlines() or [type(details).__name__])[0]
    if "missing mandatory value" in first_line.lower():
        return f"{full_key} has no value. fix: give {full_key}=... on the command line or in a YAML file"
    if wrong := _wrong_kind(full_key, first_line):
        return wrong
    if full_key:
        return f"{full_key}: {first_line}{_near_value(full_key, first_line)}"
    return first_line if isinstance(cause, OmegaConfBaseException) else " ".join(text.split())


def _no_choice(group: str, name: str, choices: Sequence[str], schema: Any) -> str:
    """The sentence for a choice that a group lacks: it may be a file, a folder, or misspelt."""
    if meant := option_of_file(group, name, kinds_of(schema)):
        return f"{group}={name} is a file, and {group}= takes names. fix: {meant}"
    if group in ("data", "experiment") and is_path(name):
        kinds = KINDS if group == "data" else "a YAML file"
        return f"{group}={name}: there is no {os.path.expanduser(name)}. fix: one of the names, or the path of {kinds}"
    if group == "data" and os.path.isdir(name):
        return f"no choice data={name}; did you mean data=./{name}? there are: {', '.join(choices)}"
    near = near_choice(name, choices)
    hint = f"did you mean {group}={near}? " if near else ""
    return f"no choice {group}={name}; {hint}there are: {', '.join(choices)}"


def is_path(word: str) -> bool:
    """Whether a choice reads like a path."""
    return "/" in word or bool(os.path.splitext(word)[1])


def _wrong_kind(key: str | None, said: str) -> str | None:
    """The sentence for a value of a kind that the option never takes; None for anything else."""
    if section := re.search(r"\w+ is not a subclass of (\w+)\. value: (.*)", said):  # the key may be empty
        where = key or section[1]
        return f"{section[2]} is no value of {where}, a section. fix: name its options, as section.option=value"
    if "is not Optional" in said:
        return f"{key} cannot be null. fix: leave it out for its default"
    if listed := re.match(r"Value (.*) \(\w+\) is not a valid input for <enum", said):
        return f"{key} takes one of the names that --help lists, got {listed[1]}. fix: {key}=<name>"
    return None


def _near_value(key: str, said: str) -> str:
    """What to add to OmegaConf's sentence about a value that is none of a list."""
    found = re.search(r"Invalid value '(.*)', expected one of \[(.*)\]", said)
    near = near_value(key, found[1], found[2].split(", ")) if found else None
    return f"; did you mean {key}={near}?" if near else ""


def null_sections(error: BaseException, arguments: Sequence[str], schema: Any) -> str | None:
    """The sentence for options of a section that is null here; None if ``error`` is not about that.

    OmegaConf asserts there that it has a section.
    """
    frames = traceback.extract_tb(error.__traceback__)
    asserted = isinstance(error, AssertionError) and frames[-1].filename == omegaconf.omegaconf.__file__
    keys = [argument.partition("=")[0].lstrip("+~") for argument in arguments if asserted]
    within = [(key, section) for section in _optional_sections(schema) for key in keys if key.startswith(f"{section}.")]
    if not within:
        return None
    named, sections = " and ".join(key for key, _ in within), sorted({section for _, section in within})
    group, _, name = sections[0].partition(".")
    choice = {"data": "data=shapes", "logger": f"logger=[csv,{name}]"}.get(group, "model=yolov3")
    return f"{named} lies in {' and '.join(sections)}, which is null here. fix: choose what has it, such as {choice}"


def _optional_sections(schema: Any, prefix: str = "") -> list[str]:
    found = []
    for name, kind in get_type_hints(schema).items():
        found += [prefix + name for part in get_args(kind) if is_dataclass(part) and type(None) in get_args(kind)]
        if is_dataclass(kind):
            found += _optional_sections(kind, f"{prefix}{name}.")
    return found


def sentence(error: Exception) -> str:
    """The message of a user error, without the traceback that torch adds in a loader worker."""
    text = str(error)
    if "in DataLoader worker process" in text:
        text = text[text.rindex(f"{type(error).__name__}: ") :].partition(": ")[2].strip()
    return text
