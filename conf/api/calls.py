"""Give callers in Python the options and errors of a program's command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import wraps
from pathlib import Path
from signal import SIGINT
from typing import Any, TypeVar

from conf.entry import compose, with_search_path
from conf.failures import USER_ERRORS, ConfigError, in_one_sentence
from conf.programs import PROGRAMS, prepare_arguments, ranks_to_start
from train_utils.launch import explain_lost_peer, shutdown
from train_utils.shell import quoted

Config = TypeVar("Config")
Result = TypeVar("Result")


class Outcome(dict[str, float]):
    """The figures of a training or an evaluation by name, such as ``AP``; none off rank 0.

    ``folder`` is where everything else was written; None if nothing was.
    """

    def __init__(self, figures: Mapping[str, float], folder: Path | None) -> None:
        super().__init__(figures)
        self.folder = folder


def callable_from_python(
    name: str,
) -> Callable[[Callable[[Config], Result]], Callable[[Config | Sequence[str]], Result]]:
    """Let the function of a program also take a list of overrides, as on the command line.

    ``name`` is the program's key in PROGRAMS. With overrides, such as ``["data=coco",
    "train.epochs=2"]``, a user's mistake raises an error with the message of the command line. At
    the end the process leaves its process group.
    """

    def decorate(function: Callable[[Config], Result]) -> Callable[[Config | Sequence[str]], Result]:
        @wraps(function)
        def call(options: Config | Sequence[str]) -> Result:
            if is_dataclass(options):
                return function(options)
            try:
                with plain_errors(name, list(map(str, options)) if isinstance(options, list | tuple) else []):
                    return function(options_of(name, options))
            except SystemExit as ended:  # how a program reports what stopped it; it must not end the caller
                if ended.code != 128 + SIGINT:
                    raise
                raise KeyboardInterrupt from ended
            finally:
                shutdown()

        return call

    return decorate


def options_of(name: str, overrides: object) -> Any:
    """The checked options of the program ``name`` with ``overrides``, as its dataclass.

    Raises ConfigError if ``overrides`` is no list of strings or holds flags, which only a command
    line takes, and the errors of composition.
    """
    program = PROGRAMS[name]
    if not isinstance(overrides, list | tuple) or not all(isinstance(word, str) for word in overrides):
        raise ConfigError(f"options are a list of key=value here, got {overrides!r}. fix: ['ckpt=best.pt']")
    arguments = with_search_path(prepare_arguments(list(overrides), program))
    if flags := [word for word in arguments if word.startswith("-")]:
        raise ConfigError(f"{flags[0]} is for the command line. fix: options of the form key=value alone")
    config: Any = compose(name, program.schema, arguments, program.complete)
    if ranks_to_start(config) > 1:
        raise ConfigError("devices starts processes on a command line alone. fix: leave it out, or python train.py")
    return config


def override(key: str, value: Any) -> str:
    """``key=value`` as Hydra reads it, for a text, a path, a number, None or a list of these."""
    return f"{key}={_typed(value)}"


def _typed(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_typed, value))}]"
    if value is None or isinstance(value, bool | int | float):
        return "null" if value is None else str(value).lower()
    return quoted(str(value))


@contextmanager
def plain_errors(name: str, overrides: Sequence[str]) -> Iterator[None]:
    """Give errors of the user in the body the message that the command line would print."""
    try:
        yield
    except Exception as caught:
        error = explain_lost_peer(caught)
        said = in_one_sentence(error, PROGRAMS[name].schema, overrides)
        if said is None:
            raise
        if not isinstance(error, USER_ERRORS):
            error = ConfigError(said)
        error.args, kind = (said,), type(error).__name__
        vars(error)["_render_traceback_"] = lambda: [f"{kind}: {said}"]  # what a notebook shows
        raise error from (caught.__cause__ if error is caught else None)
