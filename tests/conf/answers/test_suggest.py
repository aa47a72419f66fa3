"""What people type who know another program, and files that are nearly there: the answers."""

from __future__ import annotations

import re

import pytest
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from conf.answers.command_line import refusal_of_flags
from conf.answers.messages import explain
from conf.answers.suggest import kinds_of
from conf.entry import compose
from conf.failures import ConfigError
from conf.programs import PROGRAMS, prepare_arguments
from conf.schema import TrainConfig
from train_utils.errors import CheckpointError

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


def meant(program: str, typed: str) -> str | None:
    """What ``typed`` means in a program."""
    kinds = kinds_of(PROGRAMS[program].schema)
    for options in MEANT[typed]:
        if all(key in kinds for key in re.findall(r"(?<![^ '])([a-z._]+)=", options)):
            return options.removeprefix("ckpt= ")
    return None


def answer(program: str, typed: str) -> str:
    """What a program says of a command line that it refuses before it is imported."""
    schema, complete = PROGRAMS[program].schema, PROGRAMS[program].complete
    with pytest.raises((ConfigError, CheckpointError, HydraException, OmegaConfBaseException)) as found:
        compose(program, schema, prepare_arguments(typed.split(), PROGRAMS[program]), complete)
    ours = isinstance(found.value, ConfigError | CheckpointError)
    return str(found.value) if ours else explain(found.value, schema)


@pytest.mark.parametrize("program", ["train", "eval", "predict", "export", "demo", "compare"])
def test_options_of_other_programs_are_answered_with_those_of_this_one(program: str) -> None:
    for typed in MEANT:
        said, options = answer(program, typed), meant(program, typed)
        proposed = re.split("fix: |did you mean ", said)[-1].removesuffix("?").removesuffix(" instead of ckpt=")
        assert proposed == options if options else "--help lists all options" in said, said


def test_several_flags_are_answered_at_once() -> None:
    typed = "train.seed=1 --img=640 --half --resume --optim.momentum 0.9 --nothing-such --cfg=job"
    assert refusal_of_flags(typed.split(), TrainConfig) == (
        "--img, --half, --resume, --optim.momentum, --nothing-such are no options: options are key=value here. "
        "fix: train.image_size=640 train.precision=float16 resume=auto optim.momentum=0.9 "
        "(nothing here is like --nothing-such)"
    )
