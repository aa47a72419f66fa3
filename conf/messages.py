"""What a user meant: keys, choices, values and flags, by other programs' names or by letters.

``names.yaml`` holds the names of YOLO programs and Darknet. Those that differ from ours by a few
letters only are found without it.
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from conf import CONF_DIR
from conf.schema import CHOICES
from data.set_files import KINDS
from train_utils.options import option

NOT_COMPOSED = HydraException, OmegaConfBaseException, yaml.YAMLError  # what explain() explains

VALUED_FLAGS = frozenset(
    "--cfg -c --package -p --config-path -cp --config-name -cn --config-dir -cd --experimental-rerun --info -i".split()
)
HYDRA_FLAGS = VALUED_FLAGS | set(
    "--help -h --hydra-help --version --resolve --run -r --multirun -m --shell-completion -sc".split()
)

NAMES: dict[str, str] = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text(encoding="utf-8"))
KEYS = {name: keys.split() for names, keys in NAMES.items() for name in names.split()}

# Values of other programs as regular expressions, by the last word of the key.
VALUES = {
    "device": {r"gpu|(cuda:)?\d+(,\d+)*": "cuda"},
    "precision": {"true": "auto", "false|fp32|32": "float32", "half|fp16|16": "float16", "bf16": "bfloat16"},
    "cache": {"true": "ram", "false": "none"},
    "resume": {"true": "auto"},
}

# What takes a file, by its suffix: the first key that a program has.
FILES = {
    ".cfg": ("model.cfg",),
    ".weights": ("weights", "model.weights"),
    ".pt": ("ckpt", "model.weights"),
    ".pth": ("model.weights",),
}


def explain(error: Exception, schema: Any) -> str:
    """One sentence for what Hydra or OmegaConf found wrong."""
    text = str(error)
    if isinstance(error, OverrideParseException):
        return (
            f"cannot read the option {error.override}. fix: write key=value, and quote a value that holds "
            "any of = , # { [ ~ or letters like ü, as in 'data.root=\"/my data/a=b\"'"
        )
    if override := re.search(r"Could not override '([^']+)'", text):
        typed = re.search(rf"use \+{re.escape(override[1])}=(.*)", text)
        return f"no option {override[1]}; {suggest(override[1], typed and typed[1], schema)}"
    if choice := re.search(r"Could not find '((?:hydra/)?[^/]+)/(.+)'$", text, flags=re.MULTILINE):
        group, name = choice.groups()
        return _explain_choice(group, name, re.findall(r"^\t(?!base$)(\S+)$", text, flags=re.MULTILINE), schema)
    if missing := re.search(r"Could not load '(\w+)/([^'/]+)'", text):  # one of a list
        group, name = missing.groups()
        choices = sorted(file.stem for file in (CONF_DIR / group).glob("*.yaml") if file.stem != "base")
        return _explain_choice(group, name, choices, schema)
    if stray := re.match(r"Key '([^']+)' not in", text):
        key = str(getattr(error, "full_key", None) or stray[1])
        return f"no option {key}; {suggest(key, None, schema)}"
    details = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    full_key = getattr(details, "full_key", None)
    if not full_key:
        return " ".join(text.split())
    first_line = str(details).partition("\n")[0]
    if "missing mandatory value" in first_line.lower():
        return f"{full_key} has no value. fix: give {full_key}=... on the command line or in a YAML file"
    listed = re.search(r"Invalid value '(.*)', expected one of \[(.*)\]", first_line)
    near = get_close_matches(_our_value(full_key, listed[1]), listed[2].split(", "), n=1) if listed else []
    return f"{full_key}: {first_line}" + (f"; did you mean {full_key}={near[0]}?" if near else "")


def _explain_choice(group: str, name: str, choices: Sequence[str], schema: Any) -> str:
    """The sentence for a choice that a group lacks: it may be a file, or misspelt."""
    if options := _options_of_file(group, name, kinds_of(schema)):
        return f"{group}={name} is a file, and {group}= takes names. fix: {options}"
    if group in ("data", "experiment") and is_path(name):
        kinds = KINDS if group == "data" else "a YAML file"
        return f"{group}={name}: there is no {os.path.expanduser(name)}. fix: one of the names, or the path of {kinds}"
    # A name with another number is another network or set.
    spelt = os.path.splitext(name)[0].lower().replace("_", "-")
    digits = set(re.findall(r"\d", spelt))
    alike = [choice for choice in choices if not digits or set(re.findall(r"\d", choice)) <= digits]
    near = get_close_matches(spelt, alike, n=1)
    hint = f"did you mean {group}={near[0]}? " if near else ""
    return f"no choice {group}={name}; {hint}there are: {', '.join(choices)}"


def is_path(word: str) -> bool:
    """Whether a choice reads like a path."""
    return "/" in word or bool(os.path.splitext(word)[1])


def refusal_of_flags(arguments: Sequence[str], schema: Any) -> str | None:
    """The sentence for flags that are not Hydra's, with the options to type; None without such."""
    flags = dict(_foreign_flags(arguments))
    if not flags:
        return None
    options, unknown, notes, kinds = list[str](), list[str](), list[str](), kinds_of(schema)
    for flag, value in flags.items():
        if keys := near_keys(flag.lstrip("-").replace("-", "_"), value, kinds):
            options.append(_format_option(keys[0], value, kinds))
        else:
            unknown.append(flag)
    fix = " ".join(dict.fromkeys(options))
    if unknown:
        notes.append(f"nothing here is like {', '.join(unknown)}")
    if "device=cuda" in fix:
        notes.append("the environment variable CUDA_VISIBLE_DEVICES chooses among GPUs, torchrun uses several")
    fix = (fix or "--help lists all options") + (f" ({'; '.join(notes)})" if notes else "")
    verb = "is no option" if len(flags) == 1 else "are no options"
    return f"{', '.join(flags)} {verb}: options are key=value here. fix: {fix}"


def _foreign_flags(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Flags that are not Hydra's, and their values: behind ``=``, or the next word."""
    for word, following in pairwise([*arguments, "--"]):
        flag, equals, value = word.partition("=")
        value = value if equals else following
        # YOLOv5's --cfg takes a file
        of_hydra = flag in HYDRA_FLAGS and (flag != "--cfg" or value in ("job", "hydra", "all"))
        if re.match(r"--?[A-Za-z]", flag) and not of_hydra:
            yield flag, value if equals or not re.match(r"-|[\w.]+=", value) else None


def suggest(key: str, value: str | None, schema: Any) -> str:
    """A sentence with the keys that may be meant, or with the way to list all."""
    kinds = kinds_of(schema)
    near = " or ".join(
        (name if value is None else _format_option(name, value, kinds)) + _choices_with(name)
        for name in near_keys(key, value, kinds)
    )
    return f"did you mean {near}?" if near else "--help lists all options."


def kinds_of(schema: Any, prefix: str = "") -> dict[str, Any]:
    """The type of every key as typed on a command line, with the keys of all choices."""
    kinds: dict[str, Any] = {}
    for name, kind in get_type_hints(schema).items():
        kinds.setdefault(prefix + name, kind)
        for part in CHOICES.get(prefix + name, {}).values() or (kind, *get_args(kind)):
            if is_dataclass(part):
                kinds = kinds_of(part, f"{prefix}{name}.") | kinds
    return kinds


def near_keys(name: str, value: str | None, kinds: Mapping[str, Any]) -> list[str]:
    """The keys that ``name`` may mean, the likeliest first; ``key=value`` for a fixed value.

    Their last word, or the name of another program for them, is that of ``name`` or is spelt much
    like it. Those in the section of ``name`` are preferred, then those in the fewest sections.
    """
    if name in kinds:
        return [name]
    section, _, word = name.lower().replace("-", "_").rpartition(".")
    by_word: dict[str, list[str]] = {}
    for key in sorted(kinds, key=lambda key: key.count(".")):
        by_word.setdefault(key.rpartition(".")[2], []).append(key)
    is_on = value is None or value.lower() in ("true", "1")  # what a fixed value stands for
    for other, keys in KEYS.items():
        here = [key for key in keys if key in kinds or (is_on and key.partition("=")[0] in kinds)]
        if here or other == word:
            by_word[other] = here
    for near in get_close_matches(word, by_word, n=1, cutoff=0.75):
        inside = [key for key in by_word[near] if key.rpartition(".")[0] == section and section]
        outermost = [key for key in by_word[near] if key.count(".") == by_word[near][0].count(".")]
        return inside or (by_word[near][:1] if near in KEYS else outermost)
    return []


def _format_option(key: str, value: str | None, kinds: Mapping[str, Any]) -> str:
    """``key=value`` for shell and Hydra, with our word for the value.

    A file goes to the key that takes such files. Without a value it is ``true``, or left open.
    """
    if "=" in key:
        return key
    if value is None:
        is_switch = bool in (kinds[key], *get_args(kinds[key])) or _our_value(key, "true") != "true"
        value = "true" if is_switch else "..."
    if get_origin(kinds[key]) is list:
        return shlex.quote(f"{key}=[{value}]")
    return _options_of_file(key, value, kinds) or option(key, os.path.expanduser(_our_value(key, value)))


def _options_of_file(key: str, value: str, kinds: Mapping[str, Any]) -> str | None:
    """The options that take the file of ``key=value`` by its suffix; None if ``key`` is right."""
    suffix = os.path.splitext(value)[1].lower()
    fitting = [name for name in FILES.get(suffix, ()) if name in kinds]
    if not fitting or key not in ("model", "ckpt"):
        return None
    if suffix == ".weights" and "ckpt" in kinds:  # no network is chosen there otherwise
        return darknet_options(value, fitting[0])
    return option(fitting[0], os.path.expanduser(value))


def darknet_options(path: str, key: str = "model.weights") -> str:
    """Both files of a Darknet network by the name of one; the .cfg by its name in the zoo."""
    stem = os.path.splitext(os.path.expanduser(path))[0]
    zoo = os.path.basename(stem)
    in_zoo = (CONF_DIR / "model" / f"{zoo}.yaml").exists()
    return f"{option('model.cfg', zoo if in_zoo else f'{stem}.cfg')} {option(key, f'{stem}.weights')}"


def _choices_with(key: str) -> str:
    """The choices of the key's section that have it, unless all do."""
    section, _, name = key.rpartition(".")
    choices = CHOICES.get(section, {})
    having = [f"{section}={choice}" for choice, kind in choices.items() if name in get_type_hints(kind)]
    return "" if len(having) == len(choices) else f" (of {' or '.join(having)})"


def _our_value(key: str, value: str) -> str:
    """Our word for a value of other programs; ``value`` if it is none."""
    words = VALUES.get(key.rpartition(".")[2], {})
    return next((ours for theirs, ours in words.items() if re.fullmatch(theirs, value.lower())), value)
