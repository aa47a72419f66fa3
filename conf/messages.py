"""One sentence for what Hydra, OmegaConf or a part of the program found wrong."""

from __future__ import annotations

import difflib
import os.path
import re
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any, get_args, get_type_hints

from hydra.errors import OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from conf.schema import CHOICES
from train_utils.shell import option

# Flags of other YOLO programs, and the same options here.
FOREIGN_FLAGS = {
    "--epochs": "train.epochs",
    "--batch-size": "train.batch_size",
    "--batch": "train.batch_size",
    "--img": "train.image_size",
    "--img-size": "train.image_size",
    "--imgsz": "train.image_size",
    "--data": "data",
    "--cfg-file": "model.cfg",
    "--weights": "model.weights",
    "--resume": "resume",
    "--workers": "data.workers",
    "--device": "train.device",
    "--seed": "train.seed",
    "--lr": "optim.lr",
    "--freeze": "model.freeze",
    "--cache": "data.cache",
    "--rect": "evaluate.rect",
    "--single-cls": "data.single_class",
    "--name": "name",
}
# Groups take names of choices. These keys take files, by their suffixes.
KEYS_OF_FILES = {
    "model": {".cfg": "model.cfg", ".weights": "model.weights", ".pt": "model.weights", ".pth": "model.weights"},
    "data": dict.fromkeys((".yaml", ".yml", ".data"), "data.root"),  # of a YOLO set
}
HYDRA_FLAGS = (
    "--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun",
    "--shell-completion", "--config-path", "--config-name", "--config-dir", "--experimental-rerun", "--info",
)  # fmt: skip


def is_foreign_flag(flag: str) -> bool:
    """Whether ``--flag`` is neither a flag of Hydra nor an abbreviation of one."""
    return flag.startswith("--") and not any(known.startswith(flag) for known in HYDRA_FLAGS)


def foreign_flag_message(flag: str) -> str:
    """The sentence with what to type instead of a flag of another program."""
    key = FOREIGN_FLAGS.get(flag, flag.strip("-").replace("-", "_"))
    return f"{flag} is no option: options are key=value here. fix: {key}=..."


def full_keys(schema: Any, prefix: str = "") -> list[str]:
    """Every key of a schema as typed on a command line, with the keys of all choices."""
    keys = []
    for name, kind in get_type_hints(schema).items():
        keys.append(prefix + name)
        for part in CHOICES.get(prefix + name, {}).values() or (kind, *get_args(kind)):
            if is_dataclass(part):
                keys += full_keys(part, f"{prefix}{name}.")
    return list(dict.fromkeys(keys))


def suggest(key: str, schema: Any) -> str:
    """A sentence with the nearest known keys, or with the way to list all."""
    keys = full_keys(schema)
    same_last_word = [known for known in keys if known.rpartition(".")[2] == key.rpartition(".")[2]]
    near = same_last_word or difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    return f"did you mean {' or '.join(map(_with_choice, near))}?" if near else "--help lists all options."


def _with_choice(key: str) -> str:
    """The key, with the choices of its section that have it, unless all do."""
    section, _, name = key.rpartition(".")
    choices = CHOICES.get(section, {})
    having = [f"{section}={choice}" for choice, kind in choices.items() if name in get_type_hints(kind)]
    return key if len(having) == len(choices) else f"{key} (of {' or '.join(having)})"


def key_of_file(group: str, value: str) -> str | None:
    """The key that takes the file of ``group=<file>``; None if there is none."""
    return KEYS_OF_FILES.get(group, {}).get(os.path.splitext(value)[1])


def explain(error: Exception, schema: Any) -> str:
    """One sentence for what Hydra or OmegaConf found wrong."""
    text = str(error)
    cause = error.__cause__
    if isinstance(error, OverrideParseException):
        key, equals, value = str(error.override).partition("=")
        key = key_of_file(key, value) or key
        example = option(key, os.path.expanduser(value)) if equals else "'data.root=\"/my data/a=b\"'"
        return (
            f"cannot read the option {error.override}. fix: write key=value, and quote a value that holds "
            f"any of = , # {{ [ ~ or letters like ü, as in {example}"
        )
    override = re.search(r"Could not override '([^']+)'", text)
    if override:
        return f"no option {override[1]}; {suggest(override[1], schema)}"
    choice = re.search(r"Could not find '((?:hydra/)?[^/]+)/(.+)'$", text, flags=re.MULTILINE)
    if choice:
        group, name = choice.groups()
        options = re.findall(r"^\t(\S+)$", text, flags=re.MULTILINE)
        if meant := key_of_file(group, name):
            first = "data=yolo " if group == "data" else ""
            return f"{group}={name} is a file, and {group}= takes names. fix: {first}{option(meant, name)}"
        near = difflib.get_close_matches(name, options, n=1)
        hint = f"did you mean {group}={near[0]}? " if near else ""
        return f"no choice {group}={name}; {hint}there are: {', '.join(options)}"
    stray = re.match(r"Key '([^']+)' not in", text)
    if stray:
        key = str(getattr(error, "full_key", None) or stray[1])
        return f"no option {key}; {suggest(key, schema)}"
    details = cause if isinstance(cause, OmegaConfBaseException) else error
    full_key = getattr(details, "full_key", None)
    first_line = (str(details).splitlines() or [type(details).__name__])[0]
    if "missing mandatory value" in first_line.lower():
        return f"{full_key} has no value. fix: give {full_key}=... on the command line or in a YAML file"
    if full_key:
        return f"{full_key}: {first_line}"
    return first_line if isinstance(cause, OmegaConfBaseException) else " ".join(text.split())


def null_sections(keys: Sequence[str], schema: Any) -> str | None:
    """The sentence for options of a section that is null here; None if ``keys`` has none."""
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
