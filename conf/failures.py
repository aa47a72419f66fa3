"""How a program fails: one rank prints one sentence, and the exit code is 2, or 1 after a bug.

Called from Python, it raises an error with the same sentence.
"""

from __future__ import annotations

import errno
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import omegaconf.omegaconf
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from conf.messages import explain
from data.errors import DataError
from models.errors import ModelError
from train_utils.errors import CheckpointError, DistributedError, TrainError
from train_utils.launch import claim_report, explain_lost_peer

BUG_EXIT_CODE, USAGE_EXIT_CODE, SIGNAL_EXIT_CODE = 1, 2, 128  # the last plus the signal's number


class ConfigError(ValueError):
    """The command line or a YAML file asks for something that does not exist or does not fit."""


# Another OSError is a bug until some check names it.
NO_RIGHT_OR_SPACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
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
    if claim_report():
        if traced is not None:
            traceback.print_exception(traced)
        if text is not None:
            print(text, file=sys.stderr, flush=True)


def in_one_sentence(error: BaseException, schema: type, arguments: Sequence[str]) -> str | None:
    """The sentence for a user's error; None for a bug. ``arguments``: the options as given."""
    if isinstance(error, USER_ERRORS):
        text = str(error)
        if "in DataLoader worker process" in text:  # without the traceback that torch adds
            text = text[text.rindex(f"{type(error).__name__}: ") :].partition(": ")[2].strip()
        return text
    if isinstance(error, HydraException | OmegaConfBaseException):
        return explain(error, schema)
    if isinstance(error, OSError) and error.errno in NO_RIGHT_OR_SPACE:  # a write does not know its path
        return f"{error.filename or 'a file'} cannot be used ({error.strerror}). fix: name another place, or free space"
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, AssertionError) and frames and frames[-1].filename == omegaconf.omegaconf.__file__:
        options = " ".join(word for word in arguments if "." in word.partition("=")[0])
        return f"{options}: the section is null here. fix: choose what has it, as model=yolov3 or logger=[csv,wandb]"
    return None


@contextmanager
def plain_errors(schema: type, overrides: Sequence[str]) -> Iterator[None]:
    """Give errors of the user in the body the message that the command line would print.

    ``schema`` has the keys that it may name, ``overrides`` are the options as typed.
    """
    try:
        yield
    except Exception as caught:
        error = explain_lost_peer(caught)
        sentence = in_one_sentence(error, schema, overrides)
        if sentence is None:
            raise
        if not isinstance(error, USER_ERRORS):
            error = ConfigError(sentence)
        error.args, kind = (sentence,), type(error).__name__
        vars(error)["_render_traceback_"] = lambda: [f"{kind}: {sentence}"]  # what a notebook shows
        raise error from (caught.__cause__ if error is caught else None)
