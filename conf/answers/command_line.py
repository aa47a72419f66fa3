"""Command lines in the spelling of other programs, answered as a whole with the options here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_origin

from conf.answers.names import KEYS, VERBS
from conf.answers.suggest import GROUPS, called_here, kinds_of, nearest, option_of_file, plain_name, written

HELP = "--help lists all options"
CFG_VALUES = ("job", "hydra", "all")
# Hydra's flags, and whether a value follows. An abbreviation of the long ones is one, too.
HYDRA_FLAGS = {
    "--help": False, "--hydra-help": False, "--version": False, "--cfg": True, "--resolve": False, "--package": True,
    "--run": False, "--multirun": False, "--shell-completion": False, "--config-path": True, "--config-name": True,
    "--config-dir": True, "--experimental-rerun": True, "--info": False, "-h": False, "-c": True, "-p": True,
    "-r": False, "-m": False, "-sc": False, "-cp": True, "-cn": True, "-cd": True, "-i": False,
}  # fmt: skip


def misspelt(arguments: Sequence[str], schema: Any) -> str | None:
    """The sentence for flags and keys of other programs with all that replaces them, or None.

    What is unknown everywhere is left to Hydra, unless it is a flag.
    """
    kinds = kinds_of(schema)
    found = list(_foreign(list(arguments), kinds))
    if not any(name not in GROUPS for name, _ in found):  # Hydra may know a choice of that name
        return None
    meant = {name: _meant(name, value, kinds) for name, value in found}
    listed = _listed([name for name, _ in found])
    fix = " ".join(filter(None, meant.values()))
    more = "; ".join(_notes(found, [name for name, option in meant.items() if option is None]))
    if fix and not more and all(value is not None and not _is_flag(name) for name, value in found):
        return f"no option {listed}; did you mean {fix}?"
    if len(found) == 1:
        return f"{listed} is no option: options are key=value here. fix: {fix or HELP}{more and f' ({more})'}"
    return f"{listed} are no options: options are key=value here. fix: {fix or HELP}{more and f' ({more})'}"


def _notes(found: Sequence[tuple[str, str | None]], nowhere: Sequence[str]) -> Iterator[str]:
    """What to add to the options that replace ``found``: what they cannot say."""
    if nowhere:
        yield f"nothing here does what {_listed(nowhere)} does"
    for name, value in found:
        if plain_name(name) in ("device", "gpus", "i") and re.match(r"(cuda:)?\d", value or ""):
            yield "the environment variable CUDA_VISIBLE_DEVICES chooses among GPUs, torchrun uses several"
        if plain_name(name) in ("optimizer", "optimiser"):
            yield "SGD with momentum is the only optimiser"


def _foreign(words: list[str], kinds: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Names that are not ours with their values: flags, keys of the table, verbs and bare files."""
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if _is_flag(word):
            if _is_of_hydra(name, value if equals else "".join(words[:1])):
                if HYDRA_FLAGS.get(name) and not equals:
                    words[:1] = []
                continue
            following = [] if equals else _following(words)
            if following and _is_switch(name, following[0], kinds):
                following = []
            words[: len(following)] = []
            several = f"[{','.join(following)}]" if len(following) > 1 else "".join(following)
            yield name, value if equals else several or None
        elif equals:
            key = name.lstrip("+~")
            if _is_foreign_key(key, value, kinds):
                yield key, value
        elif word in VERBS or option_of_file(word, kinds):
            yield word, None


def _is_foreign_key(key: str, value: str, kinds: Mapping[str, Any]) -> bool:
    """Whether other programs have ``key``, or ``key`` is a group and ``value`` a file."""
    if key in kinds:
        return key in GROUPS and option_of_file(value, kinds, key) is not None
    of_a_user = any(key.startswith(f"{known}.") and get_origin(kind) is dict for known, kind in kinds.items())
    return plain_name(key) in {*KEYS, "mode"} and not of_a_user and "/" not in key


def _following(words: Sequence[str]) -> list[str]:
    """The values of a flag: the words up to the next flag or option."""
    values = []
    for word in words:
        if _is_flag(word) or "=" in word:
            break
        values.append(word)
    return values


def _is_switch(name: str, following: str, kinds: Mapping[str, Any]) -> bool:
    """Whether the flag ``name`` takes no value, so that ``following`` stands by itself."""
    here = called_here(name, None, kinds) or written(plain_name(name), None, kinds)
    return not here.endswith("=...") and following.lower() not in ("true", "false", "ram", "disk")


def _meant(name: str, value: str | None, kinds: Mapping[str, Any]) -> str | None:
    """What to type for ``name``; "" for nothing, None where this program has no such option."""
    if name in VERBS:
        return ""
    bare = name.lstrip("-")
    if not _is_flag(name) and value is None:
        return option_of_file(name, kinds)
    for key in (bare, bare.replace("-", "_")):
        if key in kinds:
            return written(key, value, kinds)
    near = [] if plain_name(name) in KEYS else nearest(bare.replace("-", "_"), kinds)
    return called_here(bare, value, kinds) or (written(near[0], value, kinds) if len(near) == 1 else None)


def _is_flag(word: str) -> bool:
    return re.match(r"--?[A-Za-z]", word) is not None


def _is_of_hydra(flag: str, value: str) -> bool:
    """Whether Hydra takes the flag: exactly, or abbreviated if no other program has that one."""
    if flag in ("--cfg", "-c"):
        return value in CFG_VALUES
    if flag == "-i":
        return not value.isdigit()
    abbreviated = plain_name(flag) not in KEYS and any(known.startswith(flag) for known in HYDRA_FLAGS)
    return flag in HYDRA_FLAGS or (flag.startswith("--") and abbreviated)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
