"""The programs: what each reads, and how a command line or a list in Python becomes a call.

``run`` composes and checks the options first and imports the program only then, so ``--help``, tab
completion and a refused option need no torch. Every user error leaves as one sentence on one rank
with exit code 2; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import wraps
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple, TypeVar

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from conf import CONF_DIR, REPOSITORY, checkpoints, schema, schema_tools
from conf.entry import Complete, compose, keys_of, register, to_plain, with_search_path
from conf.failures import ConfigError, plain_errors, report, report_interrupt
from conf.help import page_instead
from conf.messages import VALUED_FLAGS, refusal_of_flags
from conf.resume import complete_training
from conf.schema import EvalConfig, TrainConfig
from train_utils.launch import explain_lost_peer, prefer_expandable_segments, read_launch, shutdown
from train_utils.options import quoted

Config = TypeVar("Config")
Result = TypeVar("Result")


class Program(NamedTuple):
    """A program by its options and by the function that gets them."""

    schema: type
    function: str  # "module:function", imported once the options are right
    complete: Complete | None = None  # adds values of a checkpoint or an earlier run
    bare: str = ""  # the option that a bare word gives; with "..." the list of all of them

    @property
    def command(self) -> str:
        """What to type after ``python``, or after ``python -m`` for a script."""
        module = self.function.partition(":")[0]
        return module if "." in module else f"{module}.py"


PROGRAMS = {  # by the name of their YAML file in conf/
    "train": Program(TrainConfig, "train:train", complete_training),
    "eval": Program(EvalConfig, "eval:evaluate", checkpoints.complete_from_checkpoint),
    "predict": Program(schema.PredictConfig, "predict:predict", checkpoints.complete_detection),
    "export": Program(schema.ExportConfig, "export:export", checkpoints.model_or_checkpoint),
    "check_data": Program(schema_tools.CheckDataConfig, "scripts.check_data:main"),
    "anchors": Program(schema_tools.AnchorsConfig, "scripts.anchors:find_anchors"),
    "get_data": Program(schema_tools.GetDataConfig, "scripts.get_data:get_data", bare="name"),
    "get_weights": Program(schema_tools.GetWeightsConfig, "scripts.get_weights:get_weights", bare="name"),
    "convert": Program(schema_tools.ConvertConfig, "scripts.convert_weights:convert", checkpoints.complete_conversion),
    "demo": Program(schema.DemoConfig, "scripts.demo:main", checkpoints.complete_detection),
    "compare": Program(schema_tools.CompareConfig, "scripts.compare:compare", bare="runs..."),
    "tune": Program(schema_tools.TuneConfig, "scripts.tune:tune"),
}


def run(name: str) -> None:
    """Run the program ``name`` of PROGRAMS with the options of the command line.

    Returns after success. Otherwise exits: with code 2 after a user error, 1 after a bug.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions out of Hydra: they are reported here
    prefer_expandable_segments()
    os.environ["PYTHONPATH"] = _paths_of_children()
    program, debug = PROGRAMS[name], "debug=true" in sys.argv
    failures: list[BaseException] = []

    @hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=name)
    def main(cfg: DictConfig) -> None:
        try:
            named = keys_of(HydraConfig.get().overrides.task)
            config: Any = to_plain(cfg, program.schema, program.complete, named)
            if (count := ranks_to_start(config)) > 1:
                become_torchrun(count)
            resolve_name(program.function)(config)
        except (Exception, SystemExit) as error:
            if is_job_of_multirun():
                if isinstance(error, Exception):
                    report(error, program.schema, debug)
                raise  # Hydra goes on with the other jobs, then raises the first of these errors again
            failures.append(explain_lost_peer(error))  # reported below: Hydra would add a line of its own

    try:
        sys.argv[1:] = prepare_arguments(sys.argv[1:], program)
        if page := page_instead(name, program.command, program.schema, sys.argv[1:]):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends quietly
            print(page)
            return
        if {"-m", "--multirun"} & set(sys.argv):
            _let_signals_end_all_jobs()
        register(name, program.schema)
        main()
        if failures:
            raise failures[0]
    except KeyboardInterrupt as stop:
        sys.exit(report_interrupt(*stop.args))
    except Exception as error:
        sys.exit(report(error, program.schema, debug))
    shutdown()


def is_job_of_multirun() -> bool:
    """Whether Hydra runs this program as one of several jobs (-m); call it inside a job only."""
    return HydraConfig.get().mode is RunMode.MULTIRUN


def _let_signals_end_all_jobs() -> None:
    """End a multirun at a signal; a training saves its checkpoint first and then calls this."""

    def end(number: int, _: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number))

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, end)


def ranks_to_start(config: Any) -> int:
    """The number of processes that ``devices`` asks for; 1 for this one, or if a launcher chose.

    Raises ConfigError for more than there are GPUs, if any.
    """
    devices = config.devices if isinstance(config, TrainConfig | EvalConfig) else None
    if devices in (None, 1) or read_launch().launcher != "none":
        return 1
    import torch

    device = config.train.device if isinstance(config, TrainConfig) else config.device
    gpus = torch.cuda.device_count() if device.value != "cpu" else 0
    count = max(1, gpus) if devices == "auto" else int(devices)
    if 0 < gpus < count:
        raise ConfigError(
            f"devices={count} needs {count} GPUs, and torch finds {gpus} here. fix: devices=auto for all, "
            "or train.device=cpu (eval.py: device=cpu)"
        )
    return count


def become_torchrun(count: int) -> None:
    """Replace this process by a torchrun that starts the same command ``count`` times.

    Raises ConfigError in a job of a multirun (-m).
    """
    if is_job_of_multirun():
        raise ConfigError(f"devices={count} is for one setting. fix: start each by itself, without -m")
    from data.files import usable_cores  # imports numpy

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(usable_cores()) // count)))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    os.execv(sys.executable, [sys.executable, *torchrun, *sys.argv])


def _paths_of_children() -> str:
    """PYTHONPATH for the processes of launchers: submitit's import this clone's modules by name."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys(filter(None, [*paths, str(REPOSITORY)])))


def prepare_arguments(arguments: list[str], program: Program) -> list[str]:
    """The arguments for Hydra: without those that launchers add, bare words as an option.

    What follows ``--`` becomes the list ``options``. Raises ConfigError for the spelling of other
    programs and for a multirun of several ranks.
    """
    # torch.distributed.launch adds the local rank, which the environment has, too.
    arguments = [word for word in arguments if not word.startswith(("--local-rank=", "--local_rank="))]
    if "--" in arguments:
        at = arguments.index("--")
        arguments = [*arguments[:at], f"options=[{','.join(map(quoted, arguments[at + 1 :]))}]"]
    if {"-m", "--multirun"} & set(arguments) and read_launch().world_size > 1:
        raise ConfigError(
            "-m (multirun) cannot run under a launcher of several processes. fix: start each setting by itself"
        )
    if sentence := refusal_of_flags(arguments, program.schema):
        raise ConfigError(sentence)
    return _in_order(arguments, program.bare)


def _in_order(arguments: list[str], key: str) -> list[str]:
    """Options before flags, as Hydra wants them; bare words, or folders of any name, as ``key``."""
    bare, options, flags = [], [], []
    for before, word in pairwise(["", *arguments]):
        if word[:1] == "-" or before in VALUED_FLAGS:
            flags.append(word)
        elif key and word[:1] not in "+~" and ("=" not in word or os.path.isdir(word)):
            bare.append(word)
        else:
            options.append(word)
    if bare:
        listed = ",".join("'{}'".format(word.replace("'", r"\'")) for word in bare)
        options.append(f"{key.removesuffix('...')}=[{listed}]" if key.endswith("...") else f"{key}={' '.join(bare)}")
    return options + flags


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
                overrides = list(map(str, options)) if isinstance(options, list | tuple) else []
                with plain_errors(PROGRAMS[name].schema, overrides):
                    return function(options_of(name, options))
            except SystemExit as ended:  # how a program reports what stopped it; it must not end the caller
                if ended.code != 128 + signal.SIGINT:
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
