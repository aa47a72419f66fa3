"""What people type who know another program, and files that are nearly there: the answers."""

from __future__ import annotations

import re
import shlex

import hydra
import pytest

from conf import CONF_DIR, REPOSITORY, ConfigError
from conf.entry import compose, register
from conf.messages import KEYS, NAMES, kinds_of, refusal_of_flags
from conf.programs import PROGRAMS, prepare_arguments
from conf.schema import TrainConfig

GPUS = " (the environment variable CUDA_VISIBLE_DEVICES chooses among GPUs, torchrun uses several)"
SIZE = "train.image_size=640", "evaluate.image_size=640", "image_size=640"
BATCH = "train.batch_size=16", "evaluate.batch_size=16", "batch_size=16"
CONFIDENCE = "evaluate.confidence=0.3", "confidence=0.3"
MEANT = {  # typed, and what it means: the first whose keys a program has; "ckpt=" is not part of it
    "--epochs 3": ("train.epochs=3",),
    "--patience 50": ("train.patience=50",),
    "--lr0 0.01": ("optim.lr=0.01",),
    "--img 640": SIZE,
    "--batch 16": BATCH,
    "--conf-thres 0.3": CONFIDENCE,
    "--weights a.pt": ("ckpt=a.pt", "model.weights=a.pt"),
    "--weights yolov3.weights": ("ckpt= model.cfg=yolov3 model.weights=yolov3.weights", "model.weights=yolov3.weights"),
    "--data x.yaml": ("data=x.yaml",),
    "--device 0": (f"train.device=cuda{GPUS}", f"device=cuda{GPUS}"),
    "--cfg a.cfg": ("model.cfg=a.cfg",),
    "imgsz=640": SIZE,
    "batch=16": BATCH,
    "conf=0.3": CONFIDENCE,
    "lr0=0.01": ("optim.lr=0.01",),
    "optim.learning_rate=0.1": ("optim.lr=0.1",),
    "model=/data/my.cfg": ("model.cfg=/data/my.cfg",),
    "ckpt=tiny.weights": ("ckpt= model.cfg=tiny.cfg model.weights=tiny.weights", "model.weights=tiny.weights"),
    "ckpt=yolov4.weights": ("ckpt= model.cfg=yolov4 model.weights=yolov4.weights", "model.weights=yolov4.weights"),
}


def options_meant(program: str, typed: str) -> str | None:
    """What ``typed`` means in a program."""
    kinds = kinds_of(PROGRAMS[program].schema)
    for options in MEANT[typed]:
        if all(key in kinds for key in re.findall(r"(?<![^ '])([a-z._]+)=", options)):
            return options.removeprefix("ckpt= ")
    return None


def answer(program: str, typed: str) -> str:
    """What a program says of a command line that it refuses before it is imported."""
    schema, complete = PROGRAMS[program].schema, PROGRAMS[program].complete
    with pytest.raises(ConfigError) as refused:
        compose(program, schema, prepare_arguments(typed.split(), PROGRAMS[program]), complete)
    return str(refused.value)


@pytest.mark.parametrize("program", ["train", "eval", "predict", "export", "demo", "compare"])
def test_options_of_other_programs_are_answered_with_those_of_this_one(program: str) -> None:
    for typed in MEANT:
        sentence, options = answer(program, typed), options_meant(program, typed)
        proposed = re.split("fix: |did you mean ", sentence)[-1].removesuffix("?").removesuffix(" instead of ckpt=")
        assert proposed == options if options else "--help lists all options" in sentence, sentence


def test_several_flags_are_answered_at_once() -> None:
    typed = "train.seed=1 --img=640 --half --resume --optim.momentum 0.9 --nothing-such --cfg=job"
    assert refusal_of_flags(typed.split(), TrainConfig) == (
        "--img, --half, --resume, --optim.momentum, --nothing-such are no options: options are key=value here. "
        "fix: train.image_size=640 train.precision=float16 resume=auto optim.momentum=0.9 "
        "(nothing here is like --nothing-such)"
    )


NAMES_PAGE = REPOSITORY / "docs" / "coming-from.md"
FITTING = {  # a fitting value; for most names it is 1
    "gpu": "0", "gpus": "0,1", "amp": "true", "cfg": "a.cfg", "config": "a.cfg", "dataset": "coco",
    "cache_images": "ram", "sync_batchnorm": "true", "include": "onnx", "dynamic": "true",
    "weights": "a.pt", "pretrained": "a.pt", "checkpoint": "a.pt",
}  # fmt: skip


def test_the_page_has_the_rows_of_the_table() -> None:
    text = NAMES_PAGE.read_text(encoding="utf-8").partition("## Names of options")[2]
    rows = re.findall(r"^\| (`.*`) \| (`.*`) \|$", text, flags=re.MULTILINE)
    assert [tuple(re.sub("[`,]", "", cell) for cell in row) for row in rows] == list(NAMES.items())
    assert len(KEYS) == sum(len(names.split()) for names in NAMES), "a name stands in two rows"


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_foreign_spelling_is_answered_with_options_that_compose(program: str) -> None:
    schema = PROGRAMS[program].schema
    answers: dict[str, list[str]] = {}  # by key, each with all its values
    for name, keys in KEYS.items():
        value = FITTING.get(name, "1")
        sentence = refusal_of_flags([f"--{name.replace('_', '-')}", value], schema)
        assert sentence is not None
        if "fix: --" in sentence:  # help lists all options
            assert not {key.partition("=")[0] for key in keys} & kinds_of(schema).keys(), sentence
            continue
        for option in shlex.split(sentence.partition("fix: ")[2].partition(" (")[0]):
            value_then = option.partition("=")[2]
            assert value_then == value or option in keys or FITTING.get(name) in ("0", "0,1", "true"), sentence
            values = answers.setdefault(option.partition("=")[0], [])
            values += [option] * (option not in values)
    assert answers or program not in ("train", "eval", "predict", "export"), "nothing was meant"
    register(program, schema)
    with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        for number in range(max(map(len, answers.values()), default=0)):  # each option in one of few compositions
            hydra.compose(program, [values[number] for values in answers.values() if number < len(values)])
