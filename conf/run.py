"""The programs: what each reads, and how a command line or a list in Python becomes a call.

``run`` checks the options first and imports the program only then: ``--help``, tab completion and a
refused option need no torch. A user's error ends in one sentence, on one rank, with exit code 2;
any other error is a bug and keeps its traceback.
"""

import errno
import functools
import os
import pkgutil
import runpy
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import hydra

from conf import CONF_DIR, REPOSITORY, ConfigError, compose, errors, from_checkpoint, help, launch, schema, suggestions
from conf.compose import Config
from conf.options import quoted
from data.errors import DataError, as_started, printable, without_login, word_of
from models.cfg import ZOO, load_cfg
from models.errors import ModelError

Result = TypeVar("Result")

USER_ERRORS = ConfigError, DataError, ModelError, errors.CheckpointError, errors.DistributedError, errors.TrainError
# Places that cannot be used. Any other OSError is a bug until a check names it.
UNUSABLE = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR,
)  # fmt: skip
BUG_EXIT_CODE, USAGE_EXIT_CODE = 1, 2
LONGEST_SENTENCE = 2000  # characters; it may quote a file of any length


@dataclass(frozen=True)
class Program:
    """A program: its options, and the function that takes them."""

    schema: type
    function: str  # "module:function", imported once the options are right
    fill_in: compose.Complete | None = None  # adds values of a checkpoint or an earlier run
    splits: tuple[str, ...] = ()  # of the data set that it reads
    bare: str = ""  # the option that a bare word sets; with "..." all of them, as a list

    @property
    def command(self) -> str:
        """What to type after ``python``, or after ``python -m`` for a script."""
        module = self.function.partition(":")[0]
        return module if "." in module else f"{module}.py"

    def complete(self, options: dict[str, Any], named: Sequence[str]) -> dict[str, Any]:
        """Import the plugins that the composed ``options`` name, then fill in the options."""
        plugins = options.get("plugins", [])
        if plugins or "plugins" in sys.modules:  # otherwise there is nothing to do, and this imports torch
            pkgutil.resolve_name("plugins:import_plugins")(plugins)
        if self.fill_in is not None:
            options = self.fill_in(options, named)
        if "plugins" in options:  # only the name is kept: no file may have another file imported
            options = {**options, "plugins": [Path(file).name for file in plugins]}
        return options


PROGRAMS = {  # the key is the name of the YAML file in conf/
    "train": Program(schema.TrainConfig, "train:train", from_checkpoint.complete_training, ("train", "val")),
    "eval": Program(schema.EvalConfig, "eval:evaluate", from_checkpoint.complete_from_checkpoint, ("val",)),
    "predict": Program(schema.PredictConfig, "predict:predict", from_checkpoint.model_or_exported),
    "export": Program(schema.ExportConfig, "export:export", from_checkpoint.complete_export),
    "check_data": Program(schema.CheckDataConfig, "scripts.check_data:main", splits=("train", "val")),
    "anchors": Program(schema.AnchorsConfig, "scripts.anchors:find_anchors", splits=("train",)),
    "get_data": Program(schema.GetDataConfig, "scripts.get_data:get_data", bare="name"),
    "get_weights": Program(schema.GetWeightsConfig, "scripts.get_weights:get_weights", bare="name"),
    "convert": Program(schema.ConvertConfig, "scripts.convert_weights:convert", from_checkpoint.complete_conversion),
    "demo": Program(schema.DemoConfig, "scripts.demo:main", from_checkpoint.model_or_exported),
    "compare": Program(schema.CompareConfig, "scripts.compare:compare", bare="runs..."),
    "tune": Program(schema.TuneConfig, "scripts.tune:tune"),
}


def run_word(words: Sequence[str]) -> int:
    """Run the program that the first of ``words`` names, with the others as its options."""
    word, *options = words or ["--help"]
    names = {word_of(program.command): name for name, program in PROGRAMS.items()}
    names["conformance"] = ""  # its words are not options
    if name := names.get(word_of(word)):  # train.py and check_data, too
        return run(name, options)
    if word_of(word) == "conformance":
        sys.argv[1:] = options
        runpy.run_module("scripts.conformance", run_name="__main__")
        return 0
    if word in ("--help", "-h", "--version"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends quietly
        print(help.version_page() if word == "--version" else help.programs_page(PROGRAMS))
        return 0
    fix = f"fix: {', '.join(get_close_matches(word, names, 1) or ['another'])}; the programs are {', '.join(names)}"
    return print_error(ConfigError(f"{word} is not a program. {fix}"), schema.TrainConfig)


def run(name: str, arguments: Sequence[str] | None = None) -> int:
    """Run the program ``name`` of PROGRAMS with ``arguments``, by default the command line's.

    Returns 0. After an error it exits, with code 2 for a user's error and 1 for a bug.
    """
    escape_output()
    launch.end_with_torchrun()
    program = PROGRAMS[name]
    try:
        arguments = prepare_arguments(list(sys.argv[1:] if arguments is None else arguments), program)
        if "--version" in arguments:
            print(help.version_page())
        elif {"--help", "-h"} & set(arguments):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends quietly
            print(help.help_page(name, program.command, program.schema, arguments))
        elif any(word.startswith("-") for word in arguments):
            run_by_hydra(name, program, arguments)
        else:
            config: Any = compose.compose(name, program.schema, arguments, program.complete)
            find_files(config, program.splits)
            if (count := ranks_to_start(config)) > 1:
                start_ranks(count)
            pkgutil.resolve_name(program.function)(config)
    except (Exception, KeyboardInterrupt) as error:
        sys.exit(print_error(error, program.schema))
    launch.shutdown()
    return 0


def escape_output() -> None:
    """Escape characters that stdout cannot encode, as in some names of files and classes."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def run_by_hydra(name: str, program: Program, arguments: list[str]) -> None:
    """Let Hydra handle its own flags: ``--cfg job``, ``-m`` for several jobs, tab completion."""
    printed: list[tuple[Exception, int]] = []  # errors with their exit codes

    @hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=name)
    def job(cfg: Any) -> None:
        try:
            config: Any = compose.to_plain(cfg, program.schema, program.complete, compose.keys_of(arguments))
            if ranks_to_start(config) > 1:
                raise ConfigError(f"devices={config.devices} cannot go with -m. fix: start each setting by itself")
            pkgutil.resolve_name(program.function)(config)
        except Exception as error:
            printed.append((error, print_error(error, program.schema)))
            raise  # Hydra runs the other jobs, then raises the first of these errors again

    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that exceptions leave Hydra
    # Processes that Hydra's launchers start import this clone's modules by name.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(REPOSITORY)]))
    if {"-m", "--multirun"} & set(arguments):
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: it ends all jobs
        arguments = sorted(arguments, key=lambda word: word[:1] == "-")  # Hydra wants options before flags
    sys.argv[1:] = arguments
    compose.register(name, program.schema)
    try:
        job()
    except Exception as error:
        if codes := [code for earlier, code in printed if earlier is error]:
            sys.exit(codes[0])
        raise


def find_files(config: Any, splits: Sequence[str]) -> None:
    """Raise an error for a missing or wrong .cfg, weights or data before torch is imported.

    Ranks of a launcher look later, when they can tell the others that they fail.
    """
    if launch.read_launch().launcher == "none":
        network = getattr(config, "model", None)
        goes_on = any(getattr(config, key, None) for key in ("ckpt", "resume"))  # with weights of its own
        if network is not None and network.cfg and not goes_on:
            if network.cfg not in ZOO:  # a mistake in it comes first
                load_cfg(network.cfg)
            elif network.weights and not network.published() and not os.path.exists(network.weights):
                raise ConfigError(f"model.weights: there is no {network.weights}. fix: a file that is there")
        splits = [config.split] if isinstance(config, schema.EvalConfig) else splits
        for split in splits if splits and config.data.format != "shapes" else ():  # shapes are drawn on first use
            config.data.places(split, Path(config.data.root).absolute())


def ranks_to_start(config: Any) -> int:
    """The number of processes that ``devices`` asks for; 1 if a launcher has started them.

    Raises ConfigError for more processes than GPUs, or than cores on a machine without, and
    DataError for a batch that they cannot share.
    """
    devices = getattr(config, "devices", None)
    if devices in (None, 1) or launch.read_launch().launcher != "none":
        return 1
    import torch

    from data.io import usable_cores
    from data.samplers import check_batch_sizes

    device = config.train.device if isinstance(config, schema.TrainConfig) else config.device
    gpus = torch.cuda.device_count() if device.value != "cpu" else 0
    count = max(1, gpus) if devices == "auto" else int(devices)
    if 0 < gpus < count:
        fix = "fix: devices=auto for all of them, or train.device=cpu (eval.py: device=cpu)"
        raise ConfigError(f"devices={count} needs {count} GPUs, and torch finds {gpus} here. {fix}")
    if gpus == 0 and count > (most := max(2, len(usable_cores()))):  # two to try it out on any machine
        raise ConfigError(f"devices={count} is more than the cores that compute here. fix: devices={most}")
    if isinstance(config, schema.TrainConfig):
        images = config.train.batch_size
        check_batch_sizes(images, images, config.train.micro_batch_size or images, count)
    return count


def start_ranks(count: int) -> None:
    """Start the same command ``count`` times by torchrun, and end as it does."""
    from data.io import usable_cores  # imports numpy

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(usable_cores()) // count)))
    # As a script, __main__.py of a clone would not find its package.
    script = ["-m", "hydra_yolov3_spp"] if os.path.basename(sys.argv[0]) == "__main__.py" else sys.argv[:1]
    run_by_torchrun = pkgutil.resolve_name("train_utils.distributed:run_by_torchrun")
    sys.exit(run_by_torchrun(count, [*script, *sys.argv[1:]], quiet_codes=(USAGE_EXIT_CODE,)))


def prepare_arguments(arguments: list[str], program: Program) -> list[str]:
    """The arguments as Hydra composes them.

    ``--config-dir <folder>``, bare words and what follows ``--`` become options; what launchers add
    is dropped. Raises ConfigError for options of other programs and a multirun of several ranks.
    """
    # torch.distributed.launch adds the local rank, which is in the environment as well.
    arguments = [word for word in arguments if not word.startswith(("--local-rank=", "--local_rank="))]
    if "--" in arguments:
        at = arguments.index("--")
        arguments = [*arguments[:at], override("options", arguments[at + 1 :])]
    if "--config-dir" in arguments:
        at = arguments.index("--config-dir")
        given = arguments[at + 1 : at + 2]
        folder = Path(*given).expanduser().absolute()
        if not given or not folder.is_dir():
            said = f"there is no folder {folder}" if given else "a folder is missing"
            raise ConfigError(
                f"--config-dir: {said}. fix: --config-dir <the folder above data/, model/ or experiment/>"
            )
        arguments = [*arguments[:at], override("hydra.searchpath", [f"file://{folder}"]), *arguments[at + 2 :]]
    if {"-m", "--multirun"} & set(arguments) and launch.read_launch().world_size > 1:
        raise ConfigError("-m cannot run under a launcher of several processes. fix: start each setting by itself")
    if sentence := suggestions.refusal(arguments, program.schema, bool(program.bare)):
        raise ConfigError(sentence)
    if not program.bare or any(word.startswith("-") for word in arguments):
        return arguments
    bare = [word for word in arguments if word[:1] not in "+~" and ("=" not in word or os.path.isdir(word))]
    options = [word for word in arguments if word not in bare]
    key = program.bare.removesuffix("...")
    if not bare and key not in compose.keys_of(options):
        example = as_started(f"python -m {program.command} <{key}>")
        raise ConfigError(f"nothing to work on. fix: name a value, as in {example}")
    if bare:
        options.append(override(key, bare if key != program.bare else " ".join(bare)))
    return options


def print_error(error: BaseException, schema: type) -> int:
    """Print a user's error as a sentence, a bug as a traceback, on one rank; return the exit code.

    ``debug`` always prints the traceback. ``schema`` has the keys that the sentence may propose.
    """
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends the process at once
        sentence, code = "stopped by a signal", 128 + signal.SIGINT
    else:
        error = launch.explain_lost_peer(error)
        reason = in_one_sentence(error, schema)
        sentence, code = f"error: {reason}", USAGE_EXIT_CODE if reason is not None else BUG_EXIT_CODE
    if launch.claim_error():
        if code == BUG_EXIT_CODE or "debug=true" in sys.argv:
            print(without_login("".join(traceback.format_exception(error))), file=sys.stderr)
        if code != BUG_EXIT_CODE:
            if len(sentence) > LONGEST_SENTENCE:
                sentence = f"{sentence[: LONGEST_SENTENCE // 2]} ... {sentence[-LONGEST_SENTENCE // 2 :]}"
            sentence, fix, way_out = without_login(sentence).rpartition(" fix: ")
            print(sentence + fix.replace(" ", "\n", 1) + way_out, file=sys.stderr, flush=True)
    return code


def in_one_sentence(error: BaseException, schema: type) -> str | None:
    """The sentence for a user's error; None for a bug."""
    if isinstance(error, USER_ERRORS):
        # torch puts the traceback of a loader's process before its message.
        return printable(str(error).rpartition(f"{type(error).__name__}: ")[2].strip())
    if isinstance(error, compose.NOT_COMPOSED):
        return compose.explain(error, schema)
    if isinstance(error, OSError) and error.errno in UNUSABLE:
        path = error.filename2 or error.filename or "a file"  # the error of a write has no path
        return f"{printable(str(path))} cannot be used ({error.strerror}). fix: name another place, or free space"
    return None


class Outcome(dict[str, float]):
    """The metrics of a training or an evaluation by name, such as ``AP``; empty except on rank 0.

    ``folder`` holds everything else; None if nothing was written.
    """

    def __init__(self, metrics: Mapping[str, float], folder: Path | None) -> None:
        super().__init__(metrics)
        self.folder = folder


def callable_from_python(
    name: str,
) -> Callable[[Callable[[Config], Result]], Callable[[Config | Sequence[str]], Result]]:
    """Let the function of the program ``name`` also take a list of overrides.

    They are as on the command line, such as ``["data=coco", "train.epochs=2"]``. Either way ranks
    stay in their process group: several calls may follow, and ``run`` ends it.
    """

    def decorate(function: Callable[[Config], Result]) -> Callable[[Config | Sequence[str]], Result]:
        @functools.wraps(function)
        def call(options: Config | Sequence[str] = (), **words: Any) -> Result:
            if words:
                fix = _corrected(name, [f"{key}={value}" for key, value in words.items()])
                raise ConfigError(f"options are a list here. fix: {function.__name__}({fix})")
            if is_dataclass(options):
                return function(options)
            escape_output()
            return function(options_of(name, options))

        return call

    return decorate


def options_of(name: str, overrides: Any) -> Any:
    """The checked options of the program ``name`` with a list of ``overrides``, as its dataclass.

    Raises ConfigError for overrides that do not fit, and for flags of the command line.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"options are a list here, got {overrides!r}. fix: {_corrected(name, overrides.split())}")
    program = PROGRAMS[name]
    arguments = prepare_arguments(list(overrides), program)
    for word in arguments:
        if word.startswith("-"):
            raise ConfigError(f"{word} is for the command line. fix: options of the form key=value alone")
    config: Any = compose.compose(name, program.schema, arguments, program.complete)
    if ranks_to_start(config) > 1:
        fix = as_started("leave it out, or python train.py")
        raise ConfigError(f"devices starts processes only on a command line. fix: {fix}")
    return config


def _corrected(name: str, given: Sequence[str]) -> list[str]:
    """Options of the program ``name`` in place of those that it does not have, as far as it can."""
    answers = [suggestions.refusal([word], PROGRAMS[name].schema) or f"fix: {word}" for word in given]
    fixes = [answer.partition("fix: ")[2].partition(" (")[0] for answer in answers]
    return [word for fix in fixes if "=" in fix.partition(" ")[0] for word in shlex.split(fix)]


def override(key: str, value: Any) -> str:
    """``key=value`` for Hydra, of a text, a path, a number, a bool, None or a list of these."""
    return f"{key}={_typed(value)}"


def _typed(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_typed, value))}]"
    if value is None or isinstance(value, bool | int | float):
        return "null" if value is None else str(value).lower()
    return quoted(str(value))
