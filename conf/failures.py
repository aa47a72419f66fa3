"""How a program fails: one rank prints one sentence, and the exit code is 2, or 1 after a bug."""

from __future__ import annotations

import errno
import signal
import sys
import traceback
from collections.abc import Sequence

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from conf.answers.messages import explain, null_sections, sentence
from conf.answers.suggest import suggest_path
from data.errors import DataError
from models.errors import ModelError
from train_utils.errors import CheckpointError, DistributedError, TrainError
from train_utils.launch.environment import report_to_launcher
from train_utils.processes.ending import let_others_hear, should_report_error

BUG_EXIT_CODE, USAGE_EXIT_CODE, SIGNAL_EXIT_CODE = 1, 2, 128  # the last plus the signal's number


class ConfigError(ValueError):
    """The command line or a YAML file asks for something that does not exist or does not fit."""


# A path without rights, or no space; another OSError is a bug until some check names it.
NO_RIGHT, NO_SPACE = (errno.EACCES, errno.EPERM, errno.EROFS), (errno.ENOSPC, errno.EDQUOT)
USER_ERRORS = (ConfigError, DataError, ModelError, CheckpointError, DistributedError, TrainError)


def report(error: BaseException, schema: type, debug: bool) -> int:
    """Print a sentence, or the traceback of a bug, on one rank only; return the exit code.

    With ``debug`` there is always a traceback. ``schema`` has the keys that the sentence may name.
    """
    reason = in_one_sentence(error, schema, sys.argv[1:])
    _print_once(reason and f"error: {reason}", error if debug or reason is None else None)
    return BUG_EXIT_CODE if reason is None else USAGE_EXIT_CODE


def report_interrupt(stopped_by: signal.Signals = signal.SIGINT) -> int:
    """Report the stop on one rank, so that peers do not count it as lost; return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends it at once
    _print_once(f"stopped by {'Ctrl-C' if stopped_by == signal.SIGINT else stopped_by.name}", None)
    return SIGNAL_EXIT_CODE + stopped_by


def _print_once(text: str | None, traced: BaseException | None) -> None:
    if should_report_error():
        if traced is not None:
            traceback.print_exception(traced)
        if text is not None:
            print(text, file=sys.stderr, flush=True)
    if text is None and traced is not None:
        text = f"error: {''.join(traceback.format_exception_only(traced)).strip()}"
    report_to_launcher(str(text))
    let_others_hear()


def in_one_sentence(error: BaseException, schema: type, arguments: Sequence[str]) -> str | None:
    """The sentence for a user's error; None for a bug. ``arguments``: the options as given."""
    said: str | None
    if isinstance(error, USER_ERRORS):
        said = sentence(error)
    elif isinstance(error, HydraException | OmegaConfBaseException):
        said = explain(error, schema)
    elif isinstance(error, OSError) and error.errno in NO_SPACE:  # a write does not know its path
        said = f"{error.filename or 'a file'} cannot be written ({error.strerror}). fix: free some space there"
    elif isinstance(error, OSError) and error.errno in NO_RIGHT and error.filename:
        said = f"{error.filename} cannot be used ({error.strerror}). fix: name a place that you may read and write"
    else:
        said = null_sections(error, arguments, schema)
    return said if said is None or "did you mean" in said else said + suggest_path(said, arguments, schema)
