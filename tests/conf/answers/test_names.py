"""Every spelling of another program is answered with an option that this program takes."""

from __future__ import annotations

import shlex

import hydra
import pytest

from conf.answers.command_line import misspelt
from conf.answers.names import KEYS
from conf.answers.suggest import called_here, kinds_of
from conf.entry import CONF_DIR, register
from conf.programs import PROGRAMS

VALUES = {  # a fitting value; for most names it is 1
    "device": "0", "gpu": "0", "gpus": "0,1", "i": "0", "amp": "true", "precision": "bf16", "cfg": "a.cfg",
    "config": "a.cfg", "dataset": "coco", "single_cls": "true", "cache_images": "ram", "rect": "true",
    "sync_batchnorm": "true", "view_img": "true", "save_crop": "true", "include": "onnx", "dynamic": "true",
    "weights": "a.pt", "pretrained": "a.pt", "checkpoint": "a.pt", "model_path": "b.weights",
}  # fmt: skip


def options_in(said: str) -> list[str]:
    """What a sentence tells to type, as a shell reads it."""
    meant = said.partition("did you mean ")[2].rstrip("?") or said.partition("fix: ")[2].partition(" (")[0]
    return [] if "--help" in meant else shlex.split(meant)


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_foreign_spelling_is_answered_with_options_that_compose(program: str) -> None:
    schema = PROGRAMS[program].schema
    kinds = kinds_of(schema)
    answers: dict[str, list[str]] = {}  # by key, each with all its values
    for name in KEYS:
        value = VALUES.get(name, "1")
        for typed in ([f"--{name.replace('_', '-')}", value], [f"--{name}={value}"], [f"{name}={value}"]):
            said = misspelt(typed, schema)
            if said is None:
                assert name in kinds, typed
                continue
            options = options_in(said)
            if not options:
                assert called_here(name, value, kinds) is None and name not in kinds, said
                assert f"nothing here does what {typed[0].partition('=')[0]} does" in said
                continue
            # The value is kept, unless it has another name here or the name is a fixed value.
            kept = options[-1].partition("=")[2]
            assert kept == value or value in ("0", "0,1", "bf16", "true") or "=" in "".join(KEYS[name]), said
            for option in options:
                values = answers.setdefault(option.partition("=")[0], [])
                values += [option] * (option not in values)
    assert answers or program not in ("train", "eval", "predict", "export"), "nothing was meant"
    register(program, schema)
    with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        for number in range(max(map(len, answers.values()), default=0)):  # each option in one of few compositions
            hydra.compose(program, [values[number] for values in answers.values() if number < len(values)])
