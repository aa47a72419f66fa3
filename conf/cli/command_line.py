"""The words of a command line, before Hydra reads them, and how an error is told."""

import errno
import os
import re
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from conf import CONF_DIR, ConfigError, compose, suggestions
from conf.cli import launch
from conf.options import Words, at_home, quoted
from data.errors import UserError, as_started, of_killed_loader, without_login
from data.output import STDERR
from models.cfg import ModelError

# Places that cannot be used. Any other OSError is a bug until a check names it.
UNUSABLE = "EACCES EPERM EROFS ENOSPC EDQUOT EFBIG ENAMETOOLONG ELOOP EISDIR ENOTDIR EEXIST".split()
BUG_EXIT_CODE, USAGE_EXIT_CODE = 1, 2
OF_RUN_FOLDERS = ("hydra.run.", "hydra.sweep.", "hydra.output_subdir", "hydra.job.chdir")  # Hydra's keys
AT_HOME = re.compile(r"(?<![^=\[,: \"'])~(?=/|$)")  # Hydra cannot read it without quotes
LONGEST_SENTENCE = 2000  # characters; it may quote a file of any length


def options_and_flags(arguments: Words) -> tuple[list[str], list[str]]:
    """The options, and Hydra's flags with their values, which Hydra wants behind the options.

    ``--config-dir`` becomes an option. Raises ConfigError if there is no such folder.
    """
    options, flags = [], []
    waiting = [part for word in arguments for part in word.split("=", word.startswith("-"))]  # --cfg=job
    while waiting:
        word = waiting.pop(0)
        if word in ("--config-dir", "-cd"):
            folder = Path(*waiting[:1]).absolute()
            if not waiting or not folder.is_dir():
                says = f"{' '.join([word, *waiting[:1]])} names no folder"
                raise ConfigError(says, f"{word} <the folder above data/ or model/>")
            options.append(override("hydra.searchpath", [f"file://{folder}"]))
            del waiting[0]
        elif not word.startswith("-"):
            options.append(word)
        else:
            flags.append(word)
            if word in suggestions.VALUED_FLAGS and waiting:
                flags.append(waiting.pop(0))
    return options, flags


def prepare_arguments(arguments: Words, schema: type, command: str, bare: str = "") -> list[str]:
    """The options of a program as Hydra composes them, and behind them Hydra's flags.

    ``--config-dir <folder>``, bare words and what follows ``--`` become options; what launchers add
    is dropped. ``bare`` is the option that a bare word of ``command`` sets; with "..." all of them,
    as a list. Raises ConfigError for what Hydra would end with its usage, or take and not do.
    """
    if "--hydra-help" in arguments:  # Hydra composes nothing for it
        return ["--hydra-help"]
    behind = []
    if "--" in arguments:
        at = list(arguments).index("--")
        arguments, behind = arguments[:at], [override("options", arguments[at + 1 :])]
    words = []
    for typed in [*arguments, *behind]:
        word = AT_HOME.sub(lambda found: at_home(found[0]), typed)
        if word.startswith("train.device="):
            STDERR.write("train.device is called device now, as in the other programs\n")
            word = word.removeprefix("train.")
        word = re.sub(r"^(?!\+*hydra)\++", "", word)  # every key has its value: only Hydra's take others
        # torch.distributed.launch adds the local rank, which is in the environment as well.
        if not word.startswith(("--local-rank=", "--local_rank=")):
            words.append(word)
    if refused := suggestions.refusal(words, schema, bool(bare)):
        raise refused
    options, flags = options_and_flags(words)
    if {"-m", "--multirun"} & {*flags}:
        if launch.read_launch().world_size > 1:
            raise ConfigError("-m cannot run under a launcher of several processes", "start each setting by itself")
        if {"-c", "--cfg"} & {*flags}:
            raise ConfigError("--cfg shows the options of one run", "leave out -m, and give each option one value")
    refuse_what_hydra_would_take(options)
    if bare and not flags:
        options = _with_bare_words(options, command, bare)
    return [*options, *flags]


def refuse_what_hydra_would_take(options: Words) -> None:
    """Raise ConfigError for words that Hydra accepts and that would not do what they say."""
    for word in options:
        key, _, value = word.lstrip("+~").partition("=")
        group = key.removesuffix(".name")
        if key.startswith(OF_RUN_FOLDERS):
            raise ConfigError(f"{key}: rank 0 makes the folders, not Hydra", "run_dir=<folder>, or out= of eval.py")
        if key in ("loss.name", "optim.name") and (CONF_DIR / group / f"{value}.yaml").is_file():
            raise ConfigError(f"{word} keeps the other values of {group}= as they are", f"{group}={value}")
        if value == "???":
            raise ConfigError(f"{word} is not a value", "give one, or leave it out")


def _with_bare_words(words: list[str], command: str, bare: str) -> list[str]:
    given = [word for word in words if word[:1] not in "+~" and ("=" not in word or os.path.isdir(word))]
    options = [word for word in words if word not in given]
    key = bare.removesuffix("...")
    if given:
        return [*options, override(key, given if key != bare else " ".join(given))]
    if key not in compose.keys_of(options):
        example = as_started(f"python -m {command} <{key}>")
        raise ConfigError("nothing to work on", f"name a value, as in {example}")
    return options


def override(key: str, value: Any) -> str:
    """``key=value`` for Hydra, of a text, a path, a number, a bool, None or a list of these."""
    return f"{key}={_typed(value)}"


def _typed(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_typed, value))}]"
    if value is None or isinstance(value, bool | int | float):
        return "null" if value is None else str(value).lower()
    return quoted(str(value))


def print_error(error: BaseException, schema: type) -> int:
    """Print a user's error as a sentence, a bug as a traceback, on one rank; return the exit code.

    ``debug`` always prints the traceback. ``schema`` has the keys that the sentence may propose.
    """
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends the process at once
        text, code = "stopped by a signal", 128 + signal.SIGINT
    else:
        error = launch.explain_lost_peer(error)
        text, code = "", BUG_EXIT_CODE
        if known := for_user(error, schema):
            text, code = f"error: {known.sentence}", USAGE_EXIT_CODE
            if len(text) > LONGEST_SENTENCE:
                text = f"{text[: LONGEST_SENTENCE // 2]} ... {text[-LONGEST_SENTENCE // 2 :]}"
            text += f".\nfix: {known.fix}" if known.fix else ""
    if launch.claim_error():
        if not text or "debug=true" in sys.argv:
            text = without_login("".join(traceback.format_exception(error))) + text
        STDERR.write(f"{text}\n")
    return code


def for_user(error: BaseException, schema: type) -> UserError | None:
    """A user's error in one sentence and its fix; None for a bug."""
    if isinstance(error, UserError | ModelError):
        # Of a loader's process torch passes on a text: a traceback, and the error as printed.
        text = error.sentence.rpartition(f"{type(error).__name__}: ")[2].strip()
        sentence, _, fix = text.partition(". fix: ")
        return UserError(sentence, error.fix or fix)
    if isinstance(error, compose.NOT_COMPOSED):
        return compose.explain(error, schema)
    if isinstance(error, OSError) and errno.errorcode.get(error.errno or 0) in UNUSABLE:
        path = error.filename2 or error.filename or "a file"  # the error of a write has no path
        return UserError(f"{path} cannot be used ({error.strerror})", "another place, or free space")
    return of_killed_loader(error)
