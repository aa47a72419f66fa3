"""The options behind ``--`` of scripts/tune.py: what all trials share, and what to search."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from conf.answers.messages import explain
from conf.entry import compose, with_search_path
from conf.failures import ConfigError
from conf.schema import TrainConfig

OWN = ("run_dir", "resume")  # options that the study sets for each trial


def gather_options(given: list[str]) -> list[str]:
    """Command-line arguments, with those behind ``--`` as the list ``options``."""
    if "--" not in given:
        return given
    at = given.index("--")
    return [*given[:at], f"options=[{','.join(map(quoted, with_search_path(given[at + 1 :])))}]"]


def quoted(text: object) -> str:
    """The text quoted so that Hydra reads any of its characters in a list or behind ``=``."""
    return QuotedString(str(text), Quote.double).with_quotes()


def split_options(options: Sequence[str]) -> tuple[list[str], list[Override]]:
    """The options that all trials share, and those with several values or an interval.

    Raises ConfigError if train.py refuses a shared option, or a value or interval end to search.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(options))
        fixed = [str(each.input_line) for each in parsed if not each.is_sweep_override()]
        space = [each for each in parsed if each.is_sweep_override()]
        if own := [each.input_line for each in parsed if each.key_or_group in OWN]:
            raise ConfigError(f"{own[0]} does not fit trials. fix: leave it out behind --")
        if not space:
            raise ConfigError("there is nothing to search. fix: an option behind --, as 'optim.lr=interval(0.001,0.1)'")
        values = {each.get_key_element(): values_of(each) for each in space}
        for number in range(max(map(len, values.values()))):
            trial = [f"{key}={listed[number % len(listed)]}" for key, listed in values.items()]
            compose("train", TrainConfig, [*fixed, *trial])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"the options of the trials: {explain(error, TrainConfig)}") from error
    return fixed, space


def values_of(sweep: Override) -> list[str]:
    """The values of an option to search, or the two ends of its interval."""
    value = sweep.value()
    return [f"{value.start}", f"{value.end}"] if isinstance(value, IntervalSweep) else [*sweep.sweep_string_iterator()]
