"""What people type who know another program: each answer is accepted, and means what they meant."""

from __future__ import annotations

import shlex
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml

from conf import suggestions
from conf.cli.program import PROGRAMS
from conf.compose import compose
from conf.options import choices_of
from conf.schema import kinds_of
from tests.data.sets import a_few_of

NETWORK = ["model=yolov3", "data=shapes"]
BASES = {"train": NETWORK, "eval": NETWORK, "predict": ["source=x", "model=yolov3"], "export": NETWORK}
VALUES = {"train.image_size": "320", "data.split": "0.5"}  # of keys that do not take any value of their type
VALUES |= dict.fromkeys(("data.train.annotations", "data.val.annotations"), "folder")


def value_for(key: str, kind: Any) -> str:
    kinds = [part for part in get_args(kind) or [kind] if part is not type(None)]
    if key in VALUES or choices_of(key):
        return VALUES.get(key) or choices_of(key)[-1]
    if isinstance(kinds[0], type) and issubclass(kinds[0], Enum):
        return [*kinds[0].__members__][-1]
    if get_origin(kind) is list:
        return "[0.5,1.5]"
    return {bool: "false", str: "word", float: "0.25"}.get(kinds[0], "64")


def answer(program: str, typed: str) -> str:
    """What a program says of words that it refuses; "" if it takes them."""
    words = typed.split(" ")
    refused = suggestions.refusal(words, PROGRAMS[program].schema, bool(PROGRAMS[program].bare))
    return "" if refused is None else refused.fix


@pytest.mark.parametrize("program", a_few_of(BASES))
def test_every_row_of_the_table_can_be_pasted_and_means_its_key(program, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    kinds = kinds_of(PROGRAMS[program].schema)
    lines: list[dict[str, str]] = []  # fixes by key; several in a line, since composing takes a while
    for row, meaning in suggestions.ROWS.items():
        name, is_pair, of = row.partition("=")
        keys, _, note = meaning.partition("(")
        key, _, value = next((one for one in keys.split() if one.partition("=")[0] in kinds), "").partition("=")
        typed = f"a{of}" if of.startswith(".") else of
        if row.startswith("="):
            typed = f"{of}.pt" if of and of == typed else typed or "folder/"
        elif not is_pair:
            typed = "true" if "=" in keys else value_for(key, kinds[key]) if key else "word"
        said = answer(program, f"{name}={typed}" if name else typed)
        if said == "":
            assert name in kinds, row  # an option here
            continue
        fix = f"{key}={value or typed}"
        has_no_such = key == "precision" and fix.partition("=")[2] not in kinds[key].__members__
        if key == "" or has_no_such:
            assert said.startswith((note.strip(")") or "leave it out here, it is for ", "precision takes: ")), row
            continue
        assert shlex.split(said) == [fix] and answer(program, fix) == "", f"{row}: {said}"
        is_new = fix not in (one.get(key) for one in lines) and not of.startswith(".") and typed != "folder/"
        line = next((one for one in lines if key not in one), {})
        if is_new:
            line[key] = fix
            lines += [] if line in lines else [line]
    for line in lines:
        if "run_dir" in line:
            line.pop("resume", None)  # which excludes it
        if "evaluate.every=0" in line.values():
            line.pop("train.patience", None)
        config: Any = compose(program, PROGRAMS[program].schema, [*BASES[program], *line.values()])
        for key, fix in line.items():
            found, meant = attrgetter(key)(config), fix.partition("=")[2]
            assert choices_of(key) or str(found) == meant or found == yaml.safe_load(meant), fix


TAKEN = ""
ANSWERS = {
    "train --img 640 --epochs 3 --data coco8.yaml": "train.image_size=640 train.epochs=3 data=coco8.yaml",
    "train lr0 =0.01 epochs = 3": "optim.lr=0.01 train.epochs=3",
    "train --img 640 480 --classes 0 2": "'train.image_size=[640,480]' 'data.classes=[0,2]'",
    "train lr=0.1 lr0=0.2": "optim.lr=0.1 (lr0=0.2: optim.lr=0.2 contradicts an earlier word)",
    "train box=0.05": "leave it out, the gains of another program have other units, ",
    "train --rect --test-size 416": "train.rect=true evaluate.image_size=416",
    "train mosiac=1": "augment.mosaic=1",
    "train optim.learning_rate=0.1": "optim.lr=0.1",
    "train evaluate.precision=16": "evaluate.precision=float16",
    "train optimizer=AdamW": "optim=adamw",
    "train optimizer=RMSProp": "optim takes: adamw, darknet, sgd",
    "train -m optim.lr=0.1,0.2 trainer=ddp": "torchrun starts several machines, and devices= the GPUs of one",
    "train optim.lr=0,01": "optim.lr takes: number; commas stand in brackets, or sweep behind -m",
    "train train.epochs=1,000": "train.epochs takes: integer; commas stand in brackets, or sweep behind -m",
    "train classes=0,2": "'data.classes=[0,2]'",
    "train train.multi_scale=0.5,1.5": "'train.multi_scale=[0.5,1.5]'",
    "train -m train.seed=1,2 --config-dir mine model=yolov8n optim=adam": TAKEN,
    "train +trainer=gpu accelerator=gpu": "device=cuda",
    "train modes=train": "model takes: ",
    "train train=False tasks=detect": "train=False: the file tells what to do, ",
    "train val=pictures data.val=pictures": "data.val.annotations=pictures",
    "train test=pictures": "eval.py split=test scores the test images",
    "train tests=1": "--help lists all options",
    "train lrs=0.1": "--help lists all options",
    "train data:PATH": "--help lists the options of data",
    "train optim.rl=1": "--help lists the options of optim",
    "train width=416 height=416": "train.image_size=416",
    "train --cfg": "--cfg job prints ",
    "train --cfg job name=a\\,b": TAKEN,
    "train -c conf/train.yaml": "give options, or your own YAML file",
    "train epochs=3 nbs=64 foo=1": "train.epochs=3 (nbs=64: leave it out, train.batch_size is all that an optimiser "
    "step sees; foo=1: --help lists all options)",
    "train dog.jpg": "leave it out here, it is for predict.py",
    "predict model=last": "ckpt=last",
    "predict model=best.onnx conf=0.3": "ckpt=best.onnx confidence=0.3",
    "eval model=cells.onnx": "model_file=cells.onnx",
    "eval save_json=True": "leave it out, predict.py writes it ",
    "eval worst=true": "plots=true",
    "eval last": "ckpt=last",
    "train ckpt_path=last.pt": "resume=last.pt",
    "train dataset_dir=/": "data=/",
    "train split=test": "eval.py and check_data have split=",
    "predict best.pt detect.jpg": "ckpt=best.pt source=detect.jpg",
    "predict epochs=3": "leave it out here, it is for train.py",
    "compare a b resample=20": "resamples=20",
}


@pytest.mark.parametrize("typed", ANSWERS)
def test_what_is_typed_is_answered(typed: str) -> None:
    said = answer(*typed.split(" ", 1))
    assert said.startswith(ANSWERS[typed]) and (said or not ANSWERS[typed])
    assert said == ANSWERS[typed] or ANSWERS[typed].endswith((" ", "file")), said
