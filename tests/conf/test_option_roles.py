"""The lists of what may differ on a resume name options that exist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_type_hints

import pytest

from conf.help import options_of, sections_in
from conf.schema import CHOICES, TrainConfig
from train_utils.options import MAY_CHANGE, is_covered


def keys_of(schema: type, prefix: str = "") -> Iterator[str]:
    """Full keys of all options, of each choice of a section."""
    yield from (option.key for option in options_of(schema, prefix))
    for name, kind in get_type_hints(schema).items():
        for section in CHOICES[name].values() if name in CHOICES else sections_in(kind):
            yield from keys_of(section, f"{prefix}{name}.")


@pytest.mark.parametrize("named", MAY_CHANGE)
def test_what_may_change_is_an_option(named: str) -> None:
    assert any(is_covered(key, (named,)) for key in keys_of(TrainConfig)), f"{named} names no option"
