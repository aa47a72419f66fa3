"""What people type who know another program, and files that are nearly there: the answers."""

from __future__ import annotations

import re

import pytest

from conf import ConfigError
from conf.entry import compose
from conf.messages import kinds_of
from conf.programs import PROGRAMS, prepare_arguments

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
