"""Flags of other programs, answered all at once with the options here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from conf.answers.suggest import kinds_of, meant, written

VALUED_FLAGS = frozenset(
    "--cfg -c --package -p --config-path -cp --config-name -cn --config-dir -cd --experimental-rerun --info -i".split()
)
HYDRA_FLAGS = VALUED_FLAGS | set(
    "--help -h --hydra-help --version --resolve --run -r --multirun -m --shell-completion -sc".split()
)


def refusal_of_flags(arguments: Sequence[str], schema: Any) -> str | None:
    """The sentence for flags that are not Hydra's, with the options to type; None without such."""
    found = dict(_foreign(arguments))
    if not found:
        return None
    options, nowhere, notes = list[str](), list[str](), list[str]()
    kinds = kinds_of(schema)
    for flag, value in found.items():
        if keys := meant(flag.lstrip("-").replace("-", "_"), value, kinds):
            options.append(written(keys[0], value, kinds))
        else:
            nowhere.append(flag)
    fix = " ".join(dict.fromkeys(options))
    if nowhere:
        notes.append(f"nothing here is like {', '.join(nowhere)}")
    if "device=cuda" in fix:
        notes.append("the environment variable CUDA_VISIBLE_DEVICES chooses among GPUs, torchrun uses several")
    fix = (fix or "--help lists all options") + (f" ({'; '.join(notes)})" if notes else "")
    said = "is no option" if len(found) == 1 else "are no options"
    return f"{', '.join(found)} {said}: options are key=value here. fix: {fix}"


def _foreign(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Flags that are not Hydra's, and their values: behind ``=``, or the next word."""
    for word, following in pairwise([*arguments, "--"]):
        flag, equals, value = word.partition("=")
        value = value if equals else following
        # YOLOv5's --cfg takes a file
        of_hydra = flag in HYDRA_FLAGS and (flag != "--cfg" or value in ("job", "hydra", "all"))
        if re.match(r"--?[A-Za-z]", flag) and not of_hydra:
            yield flag, value if equals or not re.match(r"-|[\w.]+=", value) else None
