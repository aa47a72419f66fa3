"""What a user meant: a row of ``names.yaml``, or a key of nearly the same letters."""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import make_dataclass
from difflib import get_close_matches
from typing import Any

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf import CONF_DIR, ConfigError
from conf.options import choices_of, is_path, kind_in_words, option
from conf.schema import EvalConfig, ExportConfig, PredictConfig, TrainConfig, kinds_of, section_of
from data.errors import as_started

FOREIGN_NAMES: dict[str, str] = yaml.safe_load(as_started((CONF_DIR / "names.yaml").read_text(encoding="utf-8")))
ROWS = {name: keys for names, keys in FOREIGN_NAMES.items() for name in names.split()}
PROGRAMS = {"train.py": TrainConfig, "eval.py": EvalConfig, "predict.py": PredictConfig, "export.py": ExportConfig}
FLAGS = "--help -h --hydra-help --version --resolve --run -r --multirun -m --shell-completion -sc".split()
VALUED_FLAGS = "--package -p --config-dir -cd --experimental-rerun --info -i --cfg -c".split()
NEXT = re.compile(r"--?[A-Za-z]|[+~]?[\w.-]+=|[A-Z]+\.[A-Z_]{5,}")  # not the value of the word before
SEVERAL = re.compile(r"[^()\[\]{}\"',\\]+(,[^()\[\]{}\"',\\]+)+")
Kinds = Mapping[str, Any]  # the types of all keys of a program
Mistake = tuple[str, str, str]  # as typed, with name and value; "" for the name of a path, or no value


def refusal(arguments: Sequence[str], schema: Any, takes_words: bool = False) -> ConfigError | None:
    """The error of all words that are not options; ``takes_words`` lets bare words pass."""
    kinds = kinds_of(schema)
    completes = "-sc" in arguments or "--shell-completion" in arguments
    wrong = [] if completes else list(_mistakes(arguments, kinds, takes_words))
    return answer(wrong, kinds) if wrong else None


def answer(wrong: Sequence[Mistake], kinds: Kinds) -> ConfigError:
    """The error of all mistakes, with the options to type instead."""
    options, notes = dict[str, str](), []
    for typed, name, value in wrong:
        meant, note = _meant(name, value, kinds)
        if not meant or options.setdefault(meant.partition("=")[0].strip("'"), meant) != meant:
            note = note or f"{meant} contradicts an earlier word"
            notes.append(f"{typed}: {note}" if len(wrong) > 1 else note)
    fix, told = " ".join(options.values()), "; ".join(notes)
    words = [typed for typed, _, _ in wrong]
    are = "is not an option" if len(words) == 1 else "are not options"
    form = " here" if all("=" in word for word in words) else ": options are key=value here"
    return ConfigError(f"{', '.join(words)} {are}{form}", f"{fix} ({told})" if fix and told else fix or told)


def _mistakes(arguments: Sequence[str], kinds: Kinds, takes_words: bool) -> Iterator[Mistake]:
    """All words that are not options."""
    sweeps = "-m" in arguments or "--multirun" in arguments
    own = re.search(r"(?m)^(-cd|--config-dir|\+*hydra\.searchpath)", "\n".join(arguments))
    words = [word for word in arguments if word not in FLAGS and word != "="]  # with spaces around it
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        is_flag = word.startswith("-")
        is_file = os.path.exists(word) or _row_of("", word) not in ("", "=")
        takes_value = is_flag or not (is_file or takes_words)
        if takes_value and not equals and words and not NEXT.match(words[0]):
            value = words.pop(0).lstrip("=")
            while words and words[0].isdecimal():  # --img 640 480
                value += f",{words.pop(0)}"
        if is_flag:
            is_right = name in VALUED_FLAGS and (name not in ("--cfg", "-c") or value in ("job", "hydra", "all"))
        elif equals:
            is_right = _may_be(name.lstrip("+"), value, kinds, sweeps, own) or (takes_words and is_file)
        else:
            is_right = takes_words or word[:1] in ("", "~")
        if is_file and not equals:
            name, value = "", word
        if not is_right:
            yield name if is_flag else word, name.lstrip("+-"), value


def _may_be(key: str, value: str, kinds: Kinds, sweeps: bool, own: Any) -> bool:
    """Whether Hydra is to judge ``key=value``; ``own`` choices may have any name."""
    if key not in kinds:
        parent = key.rpartition(".")[0]  # the keys of a list are positions
        is_inside = parent in kinds and section_of(kinds[parent]) is None
        return is_inside or key == "experiment" or not re.fullmatch(r"(?!hydra\.)[\w.-]+", key)
    if section_of(kinds[key]) and not choices_of(key):
        return value.startswith("{")
    if SEVERAL.fullmatch(value) and not sweeps:
        return False
    row = "" if own and choices_of(key) and not is_path(value) else _row_of(key, value)
    return "=" not in row or (ROWS[row].startswith("(") and _fits(key, value, kinds))


def _row_of(name: str, value: str) -> str:
    """The row for a name: with its value or kind of file, else its last word, else ""."""
    word = name.rpartition(".")[2].lower().replace("-", "_")
    stem, suffix = os.path.splitext(value.lower())
    rows = (f"{word}={stem}{suffix}", f"={stem}", f"{word}={suffix}", word)
    return next((row for row in rows if row in ROWS), "")


def _keys(name: str, value: str, kinds: Kinds) -> tuple[list[str], str]:
    """What a name may mean: keys, as ``key=value`` if that is fixed, and what else to do."""
    options = [key for key in kinds if not section_of(kinds[key]) or choices_of(key)]
    row = _row_of(name, value)
    name = name.lower().replace("-", "_")
    if name in options and "=" not in row:
        return [name], ""
    section, _, word = name.rpartition(".")
    keys, _, note = ROWS.get(row, "").partition("(")
    found = [key for key in keys.split() if key.partition("=")[0] in options]
    if "=" not in row and value.lower() not in ("true", "1"):
        found = [key for key in found if "=" not in key]
    if row == "":
        found = [key for key in options if key.rpartition(".")[2] == word]
    found = [key for key in found if key.startswith(f"{section}.")] or found
    return found if row or len(found) == 1 else [], note.strip(")")


def _fits(key: str, value: str, kinds: Kinds) -> bool:
    """Whether an option may have a value, as far as its type tells."""
    if SEVERAL.fullmatch(value):  # commas stand in brackets only
        return False
    if choices := choices_of(key):
        listed = value.strip("[]").split(",") if key == "logger" else [value]
        return set(listed) <= {"", *choices} or (key == "data" and value[:1] != "[" and is_path(value))
    one = OmegaConf.structured(make_dataclass("One", [("value", kinds[key], MISSING)]))
    with suppress(OmegaConfBaseException, yaml.YAMLError):
        OmegaConf.update(one, "value", yaml.safe_load(value) if value[:1] == "[" or value == "null" else value)
        return True
    return False


def _meant(name: str, value: str, kinds: Kinds) -> tuple[str, str]:
    """The option that a mistake means, or else what to do about it."""
    keys, note = _keys(name, value or "true", kinds)
    key, _, own = "".join(keys[:1]).partition("=")
    typed = own or value or ("true" if kinds.get(key) is bool else "")
    if key == "data" and os.path.isdir(typed):
        typed = os.path.join(typed, "")  # else it names a choice
    for given in (typed, f"[{typed}]") if key and typed else ():
        if _fits(key, given, kinds):
            return shlex.quote(f"{key}={given}") if given[:1] == "[" else option(key, given), ""
    if note:
        return "", note
    if key:
        kind = ", ".join(choices_of(key)) or kind_in_words(kinds[key])
        return "", f"{key} takes: {kind}{'; commas stand in brackets, or sweep behind -m' if ',' in value else ''}"
    for program, schema in PROGRAMS.items():
        if _keys(name, value or "true", kinds_of(schema))[0]:
            return "", f"leave it out here, it is for {program}"
    section, dot, word = name.rpartition(".")
    for near in get_close_matches(word.lower(), [key.rpartition(".")[2] for key in kinds], n=1, cutoff=0.8):
        if near != word and len(word) > 3:  # of shorter ones any may be near
            return _meant(section + dot + near, value, kinds)
    for near in get_close_matches(re.split("[.:]", name)[0], filter(choices_of, kinds), n=1):
        return "", f"--help lists the options of {near}"
    return "", "--help lists all options"
