"""Compare two configurations, list what a resume may change, put options and types in words."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from conf import CONF_DIR, ConfigError

Options = dict[str, Any]  # of a program, nested in sections
Words = Sequence[str]  # of a command line, or the keys that it names

WORDS_OF_TYPES = {str: "text", int: "integer", float: "number", bool: "true or false", Any: "any", type(None): "null"}
# Options, or sections, of the machine: a requeued job with others still finds its run.
OF_THE_MACHINE = tuple(
    "debug devices data.root data.index_dir data.workers data.cache data.cache_gb logger device"
    " train.timeout_seconds".split()
)
# Options, or sections, in which a resumed run may differ from its checkpoint.
MAY_CHANGE = OF_THE_MACHINE + tuple(
    "run_dir run_mirror resume plugins train.epochs data.train data.val evaluate.batch_size evaluate.every"
    " evaluate.scorer train.save_every_steps train.save_every_minutes train.patience".split()
)
# Those that change no score of a run's own validation images.
NO_SCORE = tuple(
    "data.index_dir data.workers data.cache data.cache_gb data.train evaluate.batch_size evaluate.every"
    " evaluate.scorer".split()
)
_OF_DETECTIONS = (
    "evaluate.batch_size evaluate.clip evaluate.confidence evaluate.max_detections evaluate.merge_nms"
    " evaluate.nms_iou evaluate.precision"
)
# Options that a program reads with any of some settings only; without a setting, never. A name that
# ends in a dot is a section.
READ_WITH = {
    "export.py": {
        "confidence nms_iou max_detections": "nms=true",
        "calibration symmetric": "precision=int8",
        "max_drop": "check=ap",
        "data.": "check=ap precision=int8",
        "evaluate.every evaluate.image_size": "",
        "evaluate.confidence evaluate.nms_iou evaluate.max_detections": "nms=false",
        f"{_OF_DETECTIONS} evaluate.scorer": "check=ap",
    },
    "eval.py": {
        "evaluate.every": "",
        f"evaluate evaluate.image_size evaluate.resize evaluate.rect {_OF_DETECTIONS}": "detections=null",
    },
}
OF_THE_RESUME = ("run_dir", "run_mirror", "resume")  # changed by every resume, so never listed as changed


def fill(options: Options, theirs: Mapping[str, Any], named: Words = ()) -> None:
    """Put values by full key into ``options`` that have it, where the command line leaves it open.

    A choice of the whole section, such as evaluate=darknet, counts as naming all its keys.
    """
    for key, value in theirs.items():
        section, _, name = key.rpartition(".")
        part = options.get(section, {}) if section else options
        if name in part and key not in named and section not in named:
            part[name] = value


def refuse_unread(command: str, options: Mapping[str, Any], named: Words) -> None:
    """Raise ConfigError for an option ``named`` that the program does not read with ``options``."""
    for keys, settings in READ_WITH.get(command, {}).items():
        unread = [key for key in named if {key, f"{key.partition('.')[0]}."} & {*keys.split()}]
        given = {f"{key}={'null' if value is None else str(value).lower()}" for key, value in options.items()}
        if unread and given.isdisjoint(settings.split()):
            only = f"reads it with {settings.replace(' ', ' or ')} only" if settings else "never reads it"
            raise ConfigError(f"{unread[0]} has no effect here: {command} {only}", f"leave {unread[0]} out")


def changed_values(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """The differences of two configurations by full key, as ``old -> new``; not OF_THE_RESUME."""
    old, new = flat(before), flat(now)
    return {
        key: f"{old.get(key)} -> {new.get(key)}"
        for key in old | new
        if key not in OF_THE_RESUME and old.get(key) != new.get(key)
    }


def flat(nested: Mapping[str, Any], prefix: str = "") -> Options:
    """Nested dictionaries as one, with dots between the keys."""
    table: Options = {}
    for key, value in nested.items():
        table |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return table


def is_covered(key: str, options: tuple[str, ...]) -> bool:
    """Whether ``options`` contain ``key`` or a section around it."""
    return f"{key}.".startswith(tuple(f"{option}." for option in options))


def at_home(path: str) -> str:
    """The path with the home folder for a leading ``~``. Raises ConfigError if there is none."""
    full = os.path.expanduser(path)
    if full.startswith("~"):
        raise ConfigError(f"{path}: this user has no home folder", "HOME=<a folder> in the environment")
    return full


UNQUOTED = re.compile(r"[\w./+@%:*?-][\w./+@%:*? -]*(?<! )", re.ASCII)  # what Hydra reads as a text


def option(key: str, value: object) -> str:
    """``key=value``, quoted for Hydra and a POSIX shell where needed, as for a path with spaces."""
    text = str(value)
    return shlex.quote(f"{key}={text if UNQUOTED.fullmatch(text) else quoted(text)}")


def quoted(text: str) -> str:
    """A text that Hydra reads as text, even ``null`` and ``1``."""
    return '"' + re.sub(r'(\\*)("|$)', lambda match: match[1] * 2 + ('\\"' if match[2] else ""), text) + '"'


def kind_in_words(kind: Any) -> str:
    """A type hint in words: ``number or null``, ``auto, cpu, cuda``."""
    if parts := get_args(kind):
        return f"{'list of ' if len(parts) == 1 else ''}{' or '.join(map(kind_in_words, parts))}"
    if members := getattr(kind, "__members__", None):
        return ", ".join(members)
    return WORDS_OF_TYPES.get(kind) or str(kind.__name__)


def choices_of(group: str) -> list[str]:
    """The choices of a group; empty unless conf/ has the group."""
    return sorted(file.stem for file in (CONF_DIR / group).glob("*.yaml") if file.stem != "base")


def is_path(word: str) -> bool:
    """Whether a choice looks like a path."""
    return "/" in word or bool(os.path.splitext(word)[1])
