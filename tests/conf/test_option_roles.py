"""Each option of a training is decided: where may it differ without being another training?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_type_hints

import pytest

from conf.answers.describe import options_of, sections_in
from conf.schema import CHOICES, TrainConfig
from conf.sources.resume import OF_THE_MACHINE
from train_utils.run.same_training import OF_THE_RESUME, PLACES, WITHOUT_EFFECT, is_covered

# What may differ, by option or by section. A new option of a section listed as a whole inherits its
# decision; any other needs a line here.
#   resume   between a checkpoint and the run that resumes it
#   place    likewise, but only while the training set has the same content
#   restart  between two starts of a job, which still find the same run folder
ROLES = {
    "name": "resume",
    "run_dir": "resume",
    "resume": "resume",
    "resume_force": "resume",
    "extend": "resume",
    "devices": "resume restart",
    "debug": "resume restart",
    "plugins": "resume",
    "data.name": "resume",
    "data.format": "place",
    "data.root": "resume restart",
    "data.split": "",
    "data.names": "place",
    "data.single_class": "",
    "data.exif": "",
    "data.on_error": "",
    "data.workers": "resume restart",
    "data.cache": "resume restart",
    "data.index_dir": "resume restart",
    "data.train": "place",
    "data.val": "resume",
    "data.shapes": "place",
    "model.cfg": "resume",  # the network itself is compared
    "model.width": "",
    "model.scale_x_y": "",
    "model.anchors": "",
    "model.weights": "resume",
    "model.fresh_heads": "resume",
    "model.freeze": "",
    "augment": "",
    "loss": "",
    "optim": "",
    "evaluate": "resume",
    "logger": "resume restart",
    "train.epochs": "",
    "train.extended_after": "",
    "train.batch_size": "",
    "train.micro_batch_size": "",
    "train.image_size": "",
    "train.multi_scale": "",
    "train.rect": "",
    "train.repeat_threshold": "",
    "train.seed": "",
    "train.device": "resume restart",
    "train.precision": "",
    "train.compile": "",
    "train.sync_bn": "",
    "train.deterministic": "resume",
    "train.save_every_steps": "resume",
    "train.save_every_minutes": "resume",
    "train.max_nonfinite_steps": "resume",
    "train.patience": "resume",
    "train.timeout_seconds": "resume restart",
}
LISTS = {"resume": WITHOUT_EFFECT, "place": PLACES, "restart": OF_THE_MACHINE}


def keys_of(schema: type, prefix: str = "") -> Iterator[str]:
    """Full keys of all options, of each choice of a section."""
    yield from (option.key for option in options_of(schema, prefix))
    for name, kind in get_type_hints(schema).items():
        for section in CHOICES[name].values() if name in CHOICES else sections_in(kind):
            yield from keys_of(section, f"{prefix}{name}.")


KEYS = sorted(set(keys_of(TrainConfig)))


@pytest.mark.parametrize("key", KEYS)
def test_an_option_is_decided_once_and_the_program_does_so(key: str) -> None:
    decided = [words for option, words in ROLES.items() if is_covered(key, (option,))]
    assert len(decided) == 1, f"add {key} to ROLES, and to the lists of the program that it needs"
    assert {role for role, options in LISTS.items() if is_covered(key, options)} == set(decided[0].split())


@pytest.mark.parametrize("named", sorted({*ROLES, *OF_THE_RESUME, *WITHOUT_EFFECT, *PLACES, *OF_THE_MACHINE}))
def test_what_is_decided_is_an_option(named: str) -> None:
    assert any(is_covered(key, (named,)) for key in KEYS), f"{named} names no option"
