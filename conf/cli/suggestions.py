"""What a user meant by a key, choice, value or flag that does not exist here.

``names.yaml`` holds the names that other YOLO programs and Darknet use. Misspelt names are found by
their letters.
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from itertools import takewhile
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from conf import CONF_DIR
from conf.options import kind_in_words, option, quoted
from conf.schema import CHOICES, EvalConfig, ExportConfig, PredictConfig, TrainConfig
from data.errors import as_started
from data.layouts import SET_KINDS, YAML_SUFFIXES

NOT_COMPOSED = HydraException, OmegaConfBaseException, yaml.YAMLError  # the errors for explain()

VALUED_FLAGS = frozenset(
    "--cfg -c --package -p --config-path -cp --config-name -cn --config-dir -cd --experimental-rerun --info -i".split()
)
HYDRA_FLAGS = VALUED_FLAGS | set(
    "--help -h --hydra-help --version --resolve --run -r --multirun -m --shell-completion -sc".split()
)

FOREIGN_NAMES: dict[str, str] = yaml.safe_load(as_started((CONF_DIR / "names.yaml").read_text(encoding="utf-8")))
KEYS_OF_NAME = {  # the keys of a name, and last what to do without one of them
    name: [*keys.partition("(")[0].split(), *re.findall(r"\(.*", keys)]
    for names, keys in FOREIGN_NAMES.items()
    for name in names.split()
}
HOMES = {  # the programs that other programs' options may belong to
    "train.py": TrainConfig, "eval.py": EvalConfig, "predict.py": PredictConfig, "export.py": ExportConfig,
}  # fmt: skip
FLAG = re.compile(r"--?[A-Za-z]")
VALUE = re.compile(rf"(?!{FLAG.pattern}|[+~]?[\w.-]+=)")  # also -1
GPUS = re.compile(r"\[?(?:cuda:)?(\d+(?:,\d+)*)\]?")
# A key and the spaces around its =, or after its colon, in arguments that zeros join.
SPACED = re.compile(r"((?:^|(?<=\0))[\w.]+)(?:[ \0]+=[ \0]*|=\0(?=[^\0=-][^\0=]*(?:\0|$))|:[ \0]+(?=[^\0=]+(?:\0|$)))")
SPLIT_LIST = re.compile(r"(?<=[^\0]=)\[[^\0\[\]=]*\0[^\[\]=]*\]")  # a shell splits it at spaces
SEVERAL = re.compile(r"[^()\[\]{}\"'=,]+(,[^()\[\]{}\"'=,]+)+")  # values, which Hydra takes with -m only
NO_CHOICE = re.compile(r"true|false|[+-]?[\d.]+", re.IGNORECASE)
FORMS = {bool: "(?i:true|false)", int: r"[+-]?\d+", float: r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", type(None): "null"}
# Ultralytics' networks, with and without weights: yolov8n, yolo11x-seg.pt, yolov5s6.
FOREIGN_NETWORK = re.compile(r"yolo(v?\d+|x)-?[a-z]u?6?(-\w+)?(\.pt|\.pth|\.yaml)?")
SMALL_NETWORK = "model=yolov4-tiny model.weights=coco"

# Values of other programs as regular expressions, with ours for them, by the last word of the key.
FOREIGN_VALUES = {
    "optim": {"adamw?": "adamw", "sgd": "sgd"},
    "device": {"-1": "auto", r"gpu|\[?(cuda:)?\d+(,\d+)*\]?": "cuda"},
    "precision": {"true": "auto", "false|fp32|32": "float32", "half|fp16|16": "float16", "bf16": "bfloat16"},
    "cache": {"true": "ram", "false": "none"},
    "resume": {"true": "auto", "false": "null"},
    "compile": {"true": "default", "false": "off"},
    "multi_scale": {"true": "[0.5,1.5]", r"false|0(\.0)?": "[1,1]"},
}

# The keys that take a file, by its suffix; the first one that a program has is meant.
KEYS_OF_SUFFIX = {
    ".cfg": ("model.cfg",),
    ".weights": ("weights", "model.weights"),
    ".pt": ("ckpt", "model.weights"),
    ".pth": ("model.weights",),
    ".74": ("model.weights",),  # darknet53.conv.74
}


def explain(error: Exception, schema: Any) -> str:
    """The error of Hydra or OmegaConf in one sentence."""
    text = str(error)
    if isinstance(error, OverrideParseException):
        key, equals, value = (error.override or "").partition("=")
        if not equals or value[:1] in ("[", "{", '"', "'"):
            value = "a value with signs, brackets or letters like ü"
        pasted = shlex.quote(f"{key or 'key'}={quoted(value)}")
        return f"cannot read the option {error.override}. fix: write {pasted}"
    if unknown := re.search(r"Could not override '([^']+)'|^Key '([^']+)' not in", text):
        key = str(getattr(error, "full_key", None) or unknown[1] or unknown[2])
        if key in (kinds := kinds_of(schema)):  # that of another choice
            return f"{key} is not an option of the {key.partition('.')[0]}= that is chosen. fix: leave it out"
        return _answer([(key, key, None)], kinds)
    if choice := re.search(r"Could not (?:find|load) '((?:hydra/)?[^/]+)/(.+)'\.?$", text, flags=re.MULTILINE):
        group, name = choice.groups()
        listed = re.findall(r"^\t(?!base$)(\S+)$", text, flags=re.MULTILINE)  # not if the choice is one of several
        return _explain_choice(group, name, listed or choices_of(group), schema)
    details = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    full_key = getattr(details, "full_key", None)
    if not full_key:
        return " ".join(text.split())
    first_line = str(details).partition("\n")[0]
    if "missing mandatory value" in first_line.lower():
        return f"{full_key} has no value. fix: give {full_key}=... on the command line or in a YAML file"
    enum = re.search(r"Invalid value '(.*)', expected one of \[(.*)\]", first_line)
    near = get_close_matches(enum[1], enum[2].split(", "), n=1) if enum else []
    return f"{full_key}: {first_line}" + (f"; did you mean {full_key}={near[0]}?" if near else "")


def _explain_choice(group: str, name: str, choices: Sequence[str], schema: Any) -> str:
    """The sentence for a choice that a group lacks: a file, or a misspelt name."""
    if options := _options_of_file(group, name, kinds_of(schema)):
        return f"{group}={name} is a file, and {group}= takes names. fix: {options}"
    if group in ("data", "experiment") and is_path(name):
        kinds = SET_KINDS if group == "data" else "a YAML file"
        return f"{group}={name}: there is no {os.path.expanduser(name)}. fix: one of the names, or the path of {kinds}"
    near = get_close_matches(os.path.splitext(name)[0].lower().replace("_", "-"), choices, n=1)
    hint = f"did you mean {group}={near[0]}? " if near else ""
    return f"no choice {group}={name}; {hint}there are: {', '.join(choices)}"


def choices_of(group: str) -> list[str]:
    """The choices of a group; empty unless conf/ has the group."""
    return sorted(file.stem for file in (CONF_DIR / group).glob("*.yaml") if file.stem != "base")


def is_path(word: str) -> bool:
    """Whether a choice looks like a path."""
    return "/" in word or bool(os.path.splitext(word)[1])


def refusal(arguments: Sequence[str], schema: Any, takes_words: bool = False) -> str | None:
    """One sentence for all words of a command line that are not options; None if all are.

    With ``takes_words`` a word without ``=`` is right.
    """
    kinds = kinds_of(schema)
    completes = {"-sc", "--shell-completion"} & set(arguments)
    wrong = [] if completes else list(_wrong_words(arguments, kinds, takes_words))
    given = dict(word.split("=", 1) for word in arguments if "=" in word)
    if {"project", "name"} <= given.keys():  # together they are the folder
        folder = f"{given['project']}/{given['name']}"
        wrong = [(typed, key, folder if key in ("project", "name") else value) for typed, key, value in wrong]
    form = " here" if all(re.match(r"[+\w.-]*\w=", typed) for typed, _, _ in wrong) else ": options are key=value here"
    return _answer(wrong, kinds, form) if wrong else None


def _wrong_words(
    arguments: Sequence[str], kinds: Mapping[str, Any], takes_words: bool
) -> Iterator[tuple[str, str, str | None]]:
    """Each mistake as typed, with the name and value that it seems to mean; no name for a path."""
    joined = SPLIT_LIST.sub(
        lambda found: re.sub(r"[ \0]*,[ \0]*", ",", found[0]).replace("\0", " "), "\0".join(arguments)
    )
    words = SPACED.sub(r"\1=", joined).split("\0")
    sweeps = bool({"-m", "--multirun"} & set(arguments))
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if FLAG.match(name):
            values = [value] if equals else list(takewhile(VALUE.match, words))
            values = values if all(map(str.isdigit, values)) else values[:1]
            # YOLOv5's --cfg and YOLOX's -c take a file.
            if name in HYDRA_FLAGS and (name not in ("--cfg", "-c") or values[:1] in (["job"], ["hydra"], ["all"])):
                del words[: name in VALUED_FLAGS and not equals]
            else:
                del words[: 0 if equals else len(values)]
                joined = ",".join(values)
                yield name, name.lstrip("-"), (f"[{joined}]" if len(values) > 1 else joined) or None
        elif word[:1] in ("", "~") or (takes_words and (not equals or os.path.isdir(word))):
            continue
        elif equals:
            key = name.lstrip("+")
            is_wrong = word not in arguments or (key in kinds and not sweeps and SEVERAL.fullmatch(value))
            if is_wrong or (re.fullmatch(r"[\w.-]+", key) and not _may_be(key, value, kinds)):
                spaced = f"{name}={value.replace(',', ', ')}" if value[:1] == "[" else f"{name} = {value}"
                yield word if word in arguments else spaced, key, value
        elif word not in kinds and (is_path(word) or (os.path.exists(word) and not near_keys(word, None, kinds))):
            yield word, "", word
        else:
            value = words.pop(0) if words and VALUE.match(words[0]) else ""
            yield f"{word} {value}".rstrip(), word, value or None


def _may_be(key: str, value: str, kinds: Mapping[str, Any]) -> bool:
    """Whether Hydra is to judge ``key=value``."""
    if key in kinds:
        if f"{key}={value.lower()}" in KEYS_OF_NAME and not _fits(key, value, kinds):
            return False
        if (CONF_DIR / key).is_dir():
            return not NO_CHOICE.fullmatch(value) and not (key == "model" and _is_foreign_network(value))
        return section_of(kinds[key]) is not None or _our_value(key, value) == value
    parent = key.rpartition(".")[0]  # the keys of a list are positions
    return key == "experiment" or key.startswith("hydra.") or (parent in kinds and not section_of(kinds[parent]))


def section_of(kind: Any) -> type | None:
    """The dataclass in a type hint such as ``DataConfig | None``; None for that of an option."""
    return next((part for part in (kind, *get_args(kind)) if isinstance(part, type) and is_dataclass(part)), None)


def _answer(wrong: Sequence[tuple[str, str, str | None]], kinds: Mapping[str, Any], form: str = " here") -> str:
    """The sentence for the mistakes of ``_wrong_words``, with the options to type instead."""
    options, unknown = list[str](), list[str]()
    notes: dict[str, list[str]] = {}  # with the mistakes that each is about
    for typed, name, value in wrong:
        keys, note = _meant(typed, name, value, kinds)
        gpus = GPUS.fullmatch(value or "")
        if note:
            notes.setdefault(note, []).append(typed)
        elif not keys:
            unknown.append(typed)
        elif keys[0] == SMALL_NETWORK:
            options.append(SMALL_NETWORK)
            notes["networks of ultralytics are not here, and this is the smallest with published weights"] = []
        elif gpus and (keys[0].endswith("device") or ("," in gpus[1] and keys[0] == "devices")):
            count = gpus[1].count(",") + 1
            options.append(f"devices={count}" if count > 1 and "devices" in kinds else f"{keys[0]}=cuda")
            notes[f"the environment variable CUDA_VISIBLE_DEVICES={gpus[1]} chooses the GPUs"] = []
        else:
            options.append(" or ".join(_format_option(key, value, kinds) for key in keys))
    if unknown and (options or notes):
        notes[f"nothing here is like {', '.join(unknown)}"] = []
    explained = "; ".join(
        f"{', '.join(about)}: {note}" if 0 < len(about) < len(wrong) else note for note, about in notes.items()
    )
    fix = " ".join(dict.fromkeys(options))
    fix = f"{fix} ({explained})" if fix and explained else fix or explained or "--help lists all options"
    names = ", ".join(dict.fromkeys(typed for typed, _, _ in wrong))
    return f"{names} {'is not an option' if len(wrong) == 1 else 'are not options'}{form}. fix: {fix}"


def _meant(typed: str, name: str, value: str | None, kinds: Mapping[str, Any]) -> tuple[list[str], str]:
    """The keys that a mistake of ``_wrong_words`` may mean, or what to do without one."""
    if name in ("", "model", "weights") and _is_foreign_network(value or ""):
        return [SMALL_NETWORK], ""
    keys = near_keys(name, value, kinds, exact=True) if name else _keys_of_path(typed, kinds)
    if not _take(keys, value, kinds):
        for program, theirs in ((one, kinds_of(schema)) for one, schema in HOMES.items() if name[1:]):
            found = near_keys(name, value, theirs, exact=True)
            if found and found[0][0] != "(" and (not keys or _take(found, value, theirs)):
                behind = "trials" in kinds  # of scripts.tune
                return [], "put options of train.py behind --" if behind else f"leave it out, it is for {program}"
        if keys and name[1:]:
            words = ", ".join(choices_of(keys[0])) or kind_in_words(kinds[keys[0]]).removesuffix(" or null")
            words = {"integer": "a whole number", "number": "a number"}.get(words, " or ".join(words.rsplit(", ", 1)))
            return [], f"{keys[0]} takes {words}"
        keys = [] if keys else near_keys(name, value, kinds)
        return (keys, "") if _take(keys, value, kinds) else ([], "")
    if keys[0][0] == "(":
        return [], keys[0].strip("()")
    return keys, ""


def _take(keys: Sequence[str], value: str | None, kinds: Mapping[str, Any]) -> bool:
    """Whether one of ``keys`` may have a value, or that of its own; a note does."""
    pairs = [(key.partition("=")[0], key.partition("=")[2] or value) for key in keys if key[0] != "("]
    return len(pairs) < len(keys) or any(
        one is None or _options_of_file(key, one, kinds) or _fits(key, one, kinds) for key, one in pairs
    )


def _fits(key: str, value: str, kinds: Mapping[str, Any]) -> bool:
    """Whether an option may have a value, or our word for it, as far as its type tells."""
    value, kind = _our_value(key, value), kinds[key]
    ones = value.strip("[]").split(",") if SEVERAL.fullmatch(value.strip("[]")) else [value]
    if "(" in value or key in ("data", "experiment"):
        return True
    if (CONF_DIR / key).is_dir():
        return {*map(str.strip, ones)} <= {*choices_of(key)}
    if value[:1] == "[" or get_origin(kind) is list:
        return value[:1] == "[" and (kind is Any or get_origin(kind) is list)
    parts = get_args(kind) or [kind]
    names = [name for part in parts for name in getattr(part, "__members__", ())]
    forms = "|".join([*map(re.escape, names), *(FORMS.get(part, "(?!)" if names else ".*") for part in parts)])
    return all(re.fullmatch(forms, one) for one in ones)


def _is_foreign_network(value: str) -> bool:
    return bool(FOREIGN_NETWORK.fullmatch(value.lower())) and not os.path.exists(value)


def kinds_of(schema: Any, prefix: str = "") -> dict[str, Any]:
    """The type of every key of a command line, with the keys of all choices."""
    kinds: dict[str, Any] = {}
    for name, kind in get_type_hints(schema).items():
        kinds.setdefault(prefix + name, kind)
        for part in CHOICES.get(prefix + name, {}).values() or filter(None, [section_of(kind)]):
            kinds = kinds_of(part, f"{prefix}{name}.") | kinds
    return kinds


def near_keys(name: str, value: str | None, kinds: Mapping[str, Any], exact: bool = False) -> list[str]:
    """The keys that ``name`` may mean, the likeliest first; ``key=value`` if the value is fixed.

    The last word of ``name`` is that of the key, another program's name for it, or a misspelling
    unless ``exact``. Keys in the section of ``name`` win, then those in the fewest sections. A text
    in parentheses says what to do about a name without a key.
    """
    options = {key for key, kind in kinds.items() if not section_of(kind) or (CONF_DIR / key).is_dir()}
    options -= {"model.freeze"} if "optim" not in kinds else set()  # nothing else trains
    section, _, word = name.lower().replace("-", "_").rpartition(".")
    typed = "true" if value is None else value.lower()
    if name in options and (f"{word}={typed}" not in KEYS_OF_NAME or _take([name], value, kinds)):
        return [name]
    if word in ("cfg", "config") and typed.endswith(YAML_SUFFIXES):  # of options there
        word = "hyp"
    by_word: dict[str, list[str]] = {}
    for key in sorted(options, key=lambda key: (key.count("."), key)):
        by_word.setdefault(key.rpartition(".")[2], []).append(key)
    for other, keys in KEYS_OF_NAME.items():
        fits = typed in ("true", "1") or "=" in other  # whether a fixed value may be meant
        here = [key for key in keys if key[0] == "(" or ((fits or "=" not in key) and key.partition("=")[0] in options)]
        if here or other == word:
            by_word[other] = sorted(here, key=lambda key: (key[0] == "(", key.count(".")))
    near = f"{word}={typed}" if f"{word}={typed}" in KEYS_OF_NAME else word
    if near not in by_word and len(word) > 3 and not exact:  # short words are seldom misspelt
        near = next(iter(get_close_matches(word, by_word, n=1, cutoff=0.8)), word)
    keys = by_word.get(near, [])
    inside = [key for key in keys if key.rpartition(".")[0] == section and section]
    outermost = [key for key in keys if key.count(".") == keys[0].count(".")]
    return inside or (keys[:1] if near in KEYS_OF_NAME else outermost)


def _format_option(key: str, value: str | None, kinds: Mapping[str, Any]) -> str:
    """``key=value`` for shell and Hydra, with our word for the value.

    A file goes to the key that takes it. Without a value, switches get ``true``, others ``...``.
    """
    if "=" in key:
        return key
    if value is None:
        is_switch = bool in (kinds[key], *get_args(kinds[key])) or _our_value(key, "true") != "true"
        value = "true" if is_switch else "..."
    value = _our_value(key, value)
    kind, is_several = kinds[key], bool(SEVERAL.fullmatch(value))
    if get_origin(kind) is list or value[:1] == "[" or (is_several and (kind is Any or key == "logger")):
        return shlex.quote(f"{key}=[{value.strip('[]')}]")
    if (is_several or "(" in value) and kind is not Any and str not in (kind, *get_args(kind)):
        return f"-m {shlex.quote(f'{key}={value}')}"  # a run with each
    return _options_of_file(key, value, kinds) or option(key, os.path.expanduser(value))


def _options_of_file(key: str, value: str, kinds: Mapping[str, Any]) -> str | None:
    """The options that take the file ``value`` by its suffix; None if ``key`` is right."""
    suffix = os.path.splitext(value)[1].lower()
    fitting = [name for name in KEYS_OF_SUFFIX.get(suffix, ()) if name in kinds]
    if not fitting or key not in ("model", "ckpt"):
        return None
    if suffix == ".weights" and "ckpt" in kinds:  # such programs choose no network by default
        return darknet_options(value, fitting[0])
    return option(fitting[0], os.path.expanduser(value))


def _keys_of_path(path: str, kinds: Mapping[str, Any]) -> list[str]:
    """The key that takes a path typed without one, by the path's suffix."""
    suffix = os.path.splitext(path)[1].lower()
    fitting = KEYS_OF_SUFFIX.get(suffix) or {".yaml": ("data",), ".data": ("data",)}.get(suffix, ("source",))
    if not suffix:
        is_run = os.path.exists(os.path.join(path, "config.yaml"))
        fitting = ("ckpt", "resume") if is_run else ("source", "ckpt", "data")
    return [key for key in fitting if key in kinds][:1]


def darknet_options(path: str, key: str = "model.weights") -> str:
    """The options for both files of a Darknet network, given one; a .cfg of the zoo by its name."""
    stem = os.path.splitext(os.path.expanduser(path))[0]
    zoo = os.path.basename(stem)
    in_zoo = (CONF_DIR / "model" / f"{zoo}.yaml").exists()
    return f"{option('model.cfg', zoo if in_zoo else f'{stem}.cfg')} {option(key, f'{stem}.weights')}"


def _our_value(key: str, value: str) -> str:
    """Our word for a value of another program; others stay."""
    word = key.rpartition(".")[2]
    if word == "multi_scale" and re.fullmatch(r"0?\.\d+", value):  # the share by which a size may differ
        return f"[{1 - float(value):g},{1 + float(value):g}]"
    words = FOREIGN_VALUES.get(word, {})
    return next((word for pattern, word in words.items() if re.fullmatch(pattern, value.lower())), value)
