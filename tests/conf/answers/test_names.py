"""Every spelling of another program is answered with an option that this program takes."""

from __future__ import annotations

import re
import shlex

import hydra
import pytest

from conf import PROGRAMS_DIR, REPOSITORY
from conf.answers.command_line import refusal_of_flags
from conf.answers.names import KEYS, TABLE
from conf.answers.suggest import kinds_of
from conf.entry import register
from conf.programs import PROGRAMS

PAGE = REPOSITORY / "docs" / "coming-from" / "option-names.md"
VALUES = {  # a fitting value; for most names it is 1
    "gpu": "0", "gpus": "0,1", "amp": "true", "cfg": "a.cfg", "config": "a.cfg", "dataset": "coco",
    "cache_images": "ram", "sync_batchnorm": "true", "include": "onnx", "dynamic": "true",
    "weights": "a.pt", "pretrained": "a.pt", "checkpoint": "a.pt",
}  # fmt: skip


def test_the_page_has_the_rows_of_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## Options")[2]
    rows = re.findall(r"^\| (`.*`) \| (`.*`) \|$", text, flags=re.MULTILINE)
    assert [tuple(re.sub("[`,]", "", cell) for cell in row) for row in rows] == list(TABLE.items())
    assert len(KEYS) == sum(len(names.split()) for names in TABLE), "a name stands in two rows"


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_foreign_spelling_is_answered_with_options_that_compose(program: str) -> None:
    schema = PROGRAMS[program].schema
    answers: dict[str, list[str]] = {}  # by key, each with all its values
    for name, keys in KEYS.items():
        value = VALUES.get(name, "1")
        said = refusal_of_flags([f"--{name.replace('_', '-')}", value], schema)
        assert said is not None
        if "fix: --" in said:  # help lists all options
            assert not {key.partition("=")[0] for key in keys} & kinds_of(schema).keys(), said
            continue
        for option in shlex.split(said.partition("fix: ")[2].partition(" (")[0]):
            kept = option.partition("=")[2]
            assert kept == value or option in keys or VALUES.get(name) in ("0", "0,1", "true"), said
            values = answers.setdefault(option.partition("=")[0], [])
            values += [option] * (option not in values)
    assert answers or program not in ("train", "eval", "predict", "export"), "nothing was meant"
    register(program, schema)
    with hydra.initialize_config_dir(str(PROGRAMS_DIR), version_base="1.3"):
        for number in range(max(map(len, answers.values()), default=0)):  # each option in one of few compositions
            hydra.compose(program, [values[number] for values in answers.values() if number < len(values)])
