"""The programs: what each reads, and how a command line or a list in Python becomes a call.

``start`` checks the options first and imports the program only then: ``--help``, tab completion and
a refused option need no torch. A user's error ends in one sentence, on one rank, with exit code 2;
any other error is a bug and keeps its traceback.
"""

import functools
import multiprocessing
import os
import pkgutil
import re
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import hydra
from hydra.core.hydra_config import HydraConfig

from conf import CONF_DIR, ConfigError, TrainError, compose, schema
from conf.cli import command_line, help, launch, run_files
from conf.cli.from_checkpoint import complete_conversion, complete_from_checkpoint, complete_training
from conf.options import Options, Words, at_home, refuse_unread
from data.errors import as_started, word_of
from data.output import LOST, keep_numbers
from models.cfg import ZOO, load_cfg

Result = TypeVar("Result")


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

    def prepared(self, arguments: Words) -> list[str]:
        """The ``arguments`` as Hydra composes them. Raises ConfigError."""
        try:
            os.getcwd()
        except FileNotFoundError as error:
            raise ConfigError("the current folder has been removed", "cd <a folder that is there>") from error
        return command_line.prepare_arguments(arguments, self.schema, self.command, self.bare)

    def complete(self, options: Options, named: Words) -> Options:
        """Import the plugins that the composed ``options`` name, then fill in the options."""
        plugins = options.get("plugins", [])
        if missing := [file for file in plugins if not os.path.isfile(at_home(str(file)))]:
            raise ConfigError(f"plugins: there is no {missing[0]}", "plugins=[<its file>], as seen from this folder")
        ours = __name__.replace("conf.cli.program", "plugins")  # in an application below hydra_yolov3_spp
        if plugins or ours in sys.modules:  # otherwise there is nothing to do, and this imports torch
            from plugins import import_plugins

            import_plugins(plugins)
        refuse_unread(self.command, options, named)
        run_files.refuse_overwriting(options)
        if self.fill_in is not None:
            options = self.fill_in(options, named)
        if "plugins" in options:  # only the name is kept: no file may have another file imported
            options["plugins"] = list(map(os.path.basename, plugins))
        return options


PROGRAMS = {  # the key is the name of the YAML file in conf/
    "train": Program(schema.TrainConfig, "train:train", complete_training, ("train", "val")),
    "eval": Program(schema.EvalConfig, "eval:evaluate", complete_from_checkpoint, ("val",)),
    "predict": Program(schema.PredictConfig, "predict:predict", complete_from_checkpoint),
    "export": Program(schema.ExportConfig, "export:export", complete_from_checkpoint),
    "check_data": Program(schema.CheckDataConfig, "scripts.check_data:main", splits=("train", "val")),
    "anchors": Program(schema.AnchorsConfig, "scripts.anchors:find_anchors", splits=("train",)),
    "get_data": Program(schema.GetDataConfig, "scripts.get_data:get_data", bare="name"),
    "get_weights": Program(schema.GetWeightsConfig, "scripts.get_weights:get_weights", bare="name"),
    "convert": Program(schema.ConvertConfig, "scripts.convert_weights:convert", complete_conversion),
    "compare": Program(schema.CompareConfig, "scripts.compare:compare", bare="runs..."),
    "tune": Program(schema.TuneConfig, "scripts.tune:tune"),
}
PRINTING = "eval", "compare", "anchors", "get_weights"  # programs whose results are what they print


def start_by_word(words: Words) -> int:
    """Run the program that the first of ``words`` names, with the others as its options."""
    word, *options = words or ["--help"]
    names = {word_of(program.command): name for name, program in PROGRAMS.items()}
    if word in ("--help", "-h", "--version"):
        show("\n".join(launch.versions()) if word == "--version" else help.programs_page(PROGRAMS))
    elif name := names.get(word_of(word)):  # train.py and check_data, too
        return start(name, options)
    else:
        near = "".join(get_close_matches(word, names, 1)) or "--help"
        fix = f"{near}; the programs are {', '.join(names)}"
        return command_line.print_error(ConfigError(f"{word} is not a program", fix), schema.TrainConfig)
    return 0


def start(name: str, arguments: Words | None = None) -> int:
    """Run the program ``name`` of PROGRAMS with ``arguments``, by default the command line's.

    Returns 0. After an error it exits, with code 2 for a user's error and 1 for a bug.
    """
    launch.end_with_torchrun()
    keep_numbers()
    escape_output()
    launch.leave_out_current_folder()
    program = PROGRAMS[name]
    try:
        arguments = program.prepared(sys.argv[1:] if arguments is None else arguments)
        if "--version" in arguments:
            show("\n".join(launch.versions()))
        elif {"--help", "-h"} & set(arguments):
            show(help.help_page(name, program.command, program.schema, arguments))
        else:
            if any("://" in argument for argument in arguments):
                launch.check_credentials()
            run_by_hydra(name, program, arguments)
        why = LOST.get("stdout", "closed")
        if name in PRINTING and "closed" not in why and "Broken pipe" not in why:
            raise TrainError(f"{why}, and has the results", "a terminal, or a file on another disk")
    except (Exception, KeyboardInterrupt) as error:
        sys.exit(command_line.print_error(error, program.schema))
    launch.shutdown()
    return 0


def show(page: str) -> None:
    """Print a page; a reader that ends early, such as ``head``, ends this process quietly."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(page)


def escape_output() -> None:
    """Escape characters that stdout cannot encode, as in some names of files and classes."""
    with suppress(OSError, ValueError):  # it may be closed, or its reader gone
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")


def run_by_hydra(name: str, program: Program, arguments: list[str]) -> None:
    """Let Hydra compose the options and call the program: once, or with ``-m`` for each job."""
    exit_codes = []  # of the jobs that failed
    options, flags = command_line.options_and_flags(arguments)
    is_multirun = "-m" in flags or "--multirun" in flags
    shows = "-c" in flags or "--cfg" in flags  # and what a run refuses is refused, files below the page
    shown = compose.compose(name, program.schema, options, program.complete) if shows else None
    typed = sys.argv[1:]

    @hydra.main(**compose.OF_1_3, config_path=str(CONF_DIR), config_name=name)
    def job(cfg: Any) -> None:
        try:
            launch.begin_job(HydraConfig.get(), options)
            config: Any = compose.to_plain(cfg, program.schema, program.complete, arguments)
            find_files(config, program.splits)
            count = launch.ranks_to_start(config)
            if count > 1 and is_multirun:
                raise ConfigError(f"devices={config.devices} cannot go with -m", "start each setting by itself")
            look_at_images(config, count)
            if count > 1:
                launch.start_ranks(count, typed)
            pkgutil.resolve_name(program.function)(config)
        except Exception as error:
            exit_codes.append(command_line.print_error(error, program.schema))
            if is_multirun:
                raise  # Hydra runs the other jobs, then raises the first of these errors again

    if is_multirun:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: it ends all jobs
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that exceptions leave Hydra
    sys.argv[1:] = [*options, *flags]
    compose.register(name, program.schema)
    try:
        job()
    except Exception as error:
        if not exit_codes and is_multirun:  # of a process that a launcher started
            raise
        if not exit_codes:
            raise compose.explained(error, program.schema, arguments) from error
    if exit_codes:
        sys.exit(exit_codes[0])
    if shows and options:  # else nothing was typed that could be wrong
        find_files(shown, program.splits)


def find_files(config: Any, splits: Words) -> None:
    """Raise an error for wrong .cfg, weights, source, data or run_dir before torch is imported.

    Ranks of a launcher look later, when they can tell the others that they fail.
    """
    if launch.read_launch().launcher != "none":
        return
    if getattr(config, "run_dir", None) and not config.resume:
        run_files.refuse_run(Path(config.run_dir).resolve())
    network = getattr(config, "model", None)
    goes_on = getattr(config, "ckpt", None) or getattr(config, "resume", None)  # with weights of its own
    if network is not None and network.cfg and not goes_on:
        if network.cfg not in ZOO:  # a mistake in it comes first
            load_cfg(network.cfg)
        elif network.weights and not network.published() and not os.path.exists(network.weights):
            raise ConfigError(f"model.weights: there is no {network.weights}", "a file that is there")
    for key in ("source", "detections", "names"):
        path = getattr(config, key, None) or "."
        if not (os.path.exists(path) or re.search(r"://|[*?[]|^\d+$", path)):  # an address, a pattern, a camera
            raise ConfigError(f"{key}: there is no {path}", "a file; source= also takes a folder or a quoted pattern")
    for split in splits:
        if config.data.format != "shapes":  # shapes are drawn on first use
            config.data.places(getattr(config, "split", None) or split, Path(config.data.root).absolute())


def look_at_images(config: Any, ranks: int) -> None:
    """Draw or index the images of a training, and count them, before torch is imported.

    Raises DataError for wrong ones, or too few for a step. Ranks of a launcher look later.
    """
    if isinstance(config, schema.TrainConfig) and launch.read_launch().launcher == "none":
        from data.index import check_fills_batch, open_ahead  # imports numpy

        check_fills_batch(len(open_ahead(config.data, "train")), config.train.batch_size, ranks)


class Outcome(dict[str, float]):
    """Metrics by name, empty except on rank 0; ``folder`` holds what was written, or is None.

    Of eval.py also those of each class, ``per_class``, and by name precision, recall, f1 and
    threshold ``at_best_f1``.
    """

    def __init__(
        self, metrics: Mapping[str, float], folder: Path | None, per_class: Any = None, at_best_f1: Any = None
    ) -> None:
        super().__init__(metrics)
        self.folder = folder
        self.per_class = per_class or {}
        self.at_best_f1 = at_best_f1 or {}

    def __missing__(self, name: str) -> Any:
        return self.at_best_f1[name]


def callable_from_python(name: str) -> Callable[[Callable[[Any], Result]], Callable[..., Result]]:
    """Let the function of the program ``name`` also take a list of overrides, or keywords.

    They are as on the command line, such as ``["data=coco", "train.epochs=2"]``. Either way ranks
    stay in their process group: several calls may follow, and ``start`` ends it.
    """

    def decorate(function: Callable[[Any], Result]) -> Callable[..., Result]:
        @functools.wraps(function)
        def call(options: Any = (), **words: Any) -> Result:
            if is_dataclass(options) and not words:
                return function(options)
            escape_output()
            typed = str(options).split() if isinstance(options, str | os.PathLike) else options
            named = [command_line.override(key, value) for key, value in words.items()]
            return function(options_of(name, [*typed, *named]))

        return call

    return decorate


def options_of(name: str, overrides: Words) -> Any:
    """The checked options of the program ``name`` with a list of ``overrides``, as its dataclass.

    Raises ConfigError for overrides that do not fit, and for flags of the command line.
    """
    program = PROGRAMS[name]
    arguments = program.prepared(overrides)
    for word in arguments:
        if word.startswith("-"):
            raise ConfigError(f"{word} is for the command line", "options of the form key=value alone")
    config: Any = compose.compose(name, program.schema, arguments, program.complete)
    if multiprocessing.current_process().daemon and getattr(getattr(config, "data", None), "workers", 0) != 0:
        raise ConfigError("a daemonic process, as of Celery or a Pool, cannot start loaders", "data.workers=0")
    if launch.ranks_to_start(config) > 1:
        fix = as_started("leave it out, or python train.py")
        raise ConfigError("devices starts processes only on a command line", fix)
    return config
