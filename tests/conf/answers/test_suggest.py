"""What people type who know another program, and files that are nearly there: the answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.answers.command_line import refusal_of_flags
from conf.answers.suggest import suggest_path
from conf.entry import compose
from conf.messages import explain
from conf.programs import PROGRAMS
from conf.schema import TrainConfig
from conf.schema_tools import CompareConfig
from train_utils.errors import CheckpointError

GPUS = "(the environment variable CUDA_VISIBLE_DEVICES chooses among GPUs, torchrun uses several)"
FLAGS = {  # typed, and the option of each program
    "--epochs 3": ("train.epochs=3", None, None, None),
    "--patience 50": ("train.patience=50", None, None, None),
    "--lr0 0.01": ("optim.lr=0.01", None, None, None),
    "--img 640": ("train.image_size=640", "evaluate.image_size=640", "image_size=640", "image_size=640"),
    "--batch 16": ("train.batch_size=16", "evaluate.batch_size=16", "batch_size=16", "batch_size=16"),
    "--conf-thres 0.3": ("evaluate.confidence=0.3",) * 2 + ("confidence=0.3",) * 2,
    "--weights a.pt": ("model.weights=a.pt", "ckpt=a.pt", "ckpt=a.pt", "ckpt=a.pt"),
    "--weights yolov3.weights": ("model.weights=yolov3.weights",)
    + ("model.cfg=yolov3 model.weights=yolov3.weights",) * 3,
    "--data x.yaml": ("data=yolo data.root=x.yaml",) * 2 + (None, None),
    "--device 0": (f"train.device=cuda {GPUS}", f"device=cuda {GPUS}", f"device=cuda {GPUS}", None),
    "--cfg a.cfg": ("model.cfg=a.cfg",) * 4,
}
KEYS = {  # typed, and the end of the sentence of each program
    "imgsz=640": ("mean train.image_size=640?", "mean evaluate.image_size=640?", *("mean image_size=640?",) * 2),
    "batch=16": ("mean train.batch_size=16?", "mean evaluate.batch_size=16?", *("mean batch_size=16?",) * 2),
    "conf=0.3": ("mean evaluate.confidence=0.3?",) * 2 + ("mean confidence=0.3?",) * 2,
    "lr0=0.01": ("mean optim.lr=0.01?", *("no option lr0; --help lists all options.",) * 3),
    "optim.learning_rate=0.1": ("mean optim.lr=0.1?", *("learning_rate; --help lists all options.",) * 3),
    "model=/data/my.cfg": ("fix: model.cfg=/data/my.cfg",) * 4,
    "data=/x/coco8.yaml": ("fix: data=yolo data.root=/x/coco8.yaml",) * 2
    + ("no option data; --help lists all options.",) * 2,
    "ckpt=tiny.weights": (
        "no option ckpt; did you mean model.weights=tiny.weights?",
        "fix: model.cfg=<its .cfg> and model.weights=<its .weights> instead of ckpt=",
        *("",) * 2,  # refused likewise, but later
    ),
}


def answer(program: str, typed: str) -> str:
    """What a program says of a command line that it refuses before it is imported."""
    with pytest.raises(Exception) as found:
        compose(program, PROGRAMS[program].schema, typed.split(), PROGRAMS[program].complete)
    ours = isinstance(found.value, CheckpointError)
    return str(found.value) if ours else explain(found.value, PROGRAMS[program].schema)


@pytest.mark.parametrize(("number", "program"), [(0, "train"), (1, "eval"), (2, "predict"), (3, "export")])
def test_options_of_other_programs_are_answered_with_those_of_this_one(number: int, program: str) -> None:
    for typed, options in FLAGS.items():
        flag = typed.split()[0]
        fix = options[number] or f"--help lists all options (nothing here is like {flag})"
        said = refusal_of_flags(typed.split(), PROGRAMS[program].schema)
        assert said == f"{flag} is no option: options are key=value here. fix: {fix}"
    for typed, ends in KEYS.items():
        assert not ends[number] or answer(program, typed).endswith(ends[number])


def test_several_flags_are_answered_at_once() -> None:
    typed = "train.seed=1 --img=640 --half --resume --optim.momentum 0.9 --nothing-such --cfg=job"
    assert refusal_of_flags(typed.split(), TrainConfig) == (
        "--img, --half, --resume, --optim.momentum and --nothing-such are no options: options are key=value here. "
        "fix: train.image_size=640 train.precision=float16 resume=auto optim.momentum=0.9 "
        "(nothing here is like --nothing-such)"
    )


@pytest.mark.parametrize(
    ("typed", "said", "more"),
    [
        ("model={0}/my.cgf", "no choice model={0}/my.cgf", "; did you mean model.cfg={0}/my.cfg?"),
        ("data.root={0}/data-set", "{0}/data-set/a.json is missing", "; did you mean data.root={0}/dataset?"),
        ("resume={0}/runs/nw/1", "{0}/runs/nw/1 has no config.yaml", "; did you mean resume={0}/runs/new/1?"),
        ("data.root={0}/another", "there is no {0}/another", ""),
        ("data.root={0}/dataset", "{0}/dataset/a.json is missing", ""),
        ("data.root={0}/my.cfg/a", "there is no {0}/my.cfg/a", ""),
        ("data.root={0}/data-set", "train.epochs must be 1 or more", ""),
    ],
)
def test_a_file_that_is_not_there_is_answered_with_the_nearest_one(
    typed: str, said: str, more: str, tmp_path: Path
) -> None:
    (tmp_path / "my.cfg").touch()
    (tmp_path / "dataset").mkdir()
    (tmp_path / "runs" / "new" / "1").mkdir(parents=True)
    arguments = ["train.seed=1", typed.format(tmp_path)]
    assert suggest_path(said.format(tmp_path), arguments, TrainConfig) == more.format(tmp_path)
    many = suggest_path(
        f"{tmp_path}/rums is no folder", [f"runs=['{tmp_path}/dataset','{tmp_path}/rums']"], CompareConfig
    )
    assert many == f"; did you mean {tmp_path}/runs?"
