"""What people type who know another program, and files that are nearly there: the answers."""

from __future__ import annotations

import re
import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

from conf import REPOSITORY, ConfigError, suggestions
from conf.compose import compose
from conf.run import PROGRAMS, prepare_arguments

GPUS = "(the environment variable CUDA_VISIBLE_DEVICES={} chooses the GPUs)"
SIZE = "train.image_size=640", "evaluate.image_size=640", "image_size=640"
BATCH = "train.batch_size=16", "evaluate.batch_size=16", "batch_size=16"
CONFIDENCE = "evaluate.confidence=0.3", "confidence=0.3"
MEANT = {  # typed, and what it means: the first whose keys a program has; "ckpt=" is not part of it
    "--epochs 3": ("train.epochs=3",),
    "imgsz=640": SIZE,
    "-b 16": BATCH,
    "batchsize=16": BATCH,
    "--conf-thres 0.3": CONFIDENCE,
    "--weights a.pt": ("ckpt=a.pt", "model.weights=a.pt"),
    "--weights yolov3.weights": ("ckpt= model.cfg=yolov3 model.weights=yolov3.weights", "model.weights=yolov3.weights"),
    "--data x.yaml": ("data=x.yaml",),
    "--device 0": (f"train.device=cuda {GPUS.format(0)}", f"device=cuda {GPUS.format(0)}"),
    "--device 0 1": (f"devices=2 {GPUS.format('0,1')}", f"device=cuda {GPUS.format('0,1')}"),
    "device=cuda:1": (f"train.device=cuda {GPUS.format(1)}", f"device=cuda {GPUS.format(1)}"),
    "--rect": ("train.rect=true", "evaluate.rect=true", "rect=true"),
    "optimizer=AdamW": ("optim=adamw",),
    "--pretrained": ("model.weights=coco",),
    "pretrained=false": ("model.weights=null",),
    "half=true": ("train.precision=float16", "evaluate.precision=float16", "precision=float16"),
    "mosiac=1": ("augment.mosaic=1",),
    "-c best.pt": ("ckpt=best.pt", "model.weights=best.pt"),
    "lr0 = 0.01": ("optim.lr=0.01",),
    "lr0= 0.01": ("optim.lr=0.01",),
    "lr0 =0.01": ("optim.lr=0.01",),
    "lr0 0.01": ("optim.lr=0.01",),
    "/x/best.pt": ("ckpt=/x/best.pt", "model.weights=/x/best.pt"),
    "my.cfg": ("model.cfg=my.cfg",),
    "cats.yaml": ("data=cats.yaml",),
    "fraction=0.5": (),
    "optim.learning_rate=0.1": ("optim.lr=0.1",),
    "model=/data/my.cfg": ("model.cfg=/data/my.cfg",),
    "ckpt=tiny.weights": ("ckpt= model.cfg=tiny.cfg model.weights=tiny.weights", "model.weights=tiny.weights"),
}


def options_meant(program: str, typed: str) -> str | None:
    """What ``typed`` means in a program."""
    kinds = suggestions.kinds_of(PROGRAMS[program].schema)
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


@pytest.mark.parametrize("program", ["train", "eval", "predict"])
def test_options_of_other_programs_are_answered_with_those_of_this_one(program: str) -> None:
    for typed in MEANT:
        sentence, options = answer(program, typed), options_meant(program, typed)
        proposed = re.split("fix: |did you mean ", sentence)[-1].removesuffix("?").removesuffix(" instead of ckpt=")
        assert proposed == (options or "--help lists all options"), f"{typed}: {sentence}"


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        (
            "train epochs=3 --img 640 -o train.seed=0 foo=1 nc=2 precision=half dog.jpg",
            "epochs=3, --img, -o, foo=1, nc=2, precision=half, dog.jpg are not options: options are key=value here. "
            "fix: train.epochs=3 train.image_size=640 train.precision=float16 (-o: leave it out, ",
        ),
        (
            "train --hyp a.yaml",
            "--hyp is not an option: options are key=value here. fix: give options, or your own YAML",
        ),
        ("train -d 8", "-d is not an option: options are key=value here. fix: devices=8"),
        ("train batch=-1", "batch=-1 is not an option here. fix: give a number of images, because no batch is fitted"),
        ("train resume=true", "resume=true is not an option here. fix: resume=auto"),
        (
            "predict best.pt dog.jpg",
            "best.pt, dog.jpg are not options: options are key=value here. fix: ckpt=best.pt s",
        ),
        ("compare a b resample=20", "resample=20 is not an option here. fix: resamples=20"),
    ],
)
def test_one_sentence_answers_all_that_is_wrong(typed: str, sentence: str) -> None:
    assert sentence in answer(*typed.split(maxsplit=1))


def test_the_documentation_has_the_names_of_the_table() -> None:
    rows = ""
    for names, keys in suggestions.FOREIGN_NAMES.items():
        ours = keys.strip("()") if keys[0] == "(" else _as_code(keys)
        rows += f"| {_as_code(names)} | {ours} |\n"
    assert (REPOSITORY / "docs/coming-from.md").read_text(encoding="utf-8").endswith(f"\n|---|---|\n{rows}")


def _as_code(words: str) -> str:
    return ", ".join(f"`{word}`" for word in words.split())


@pytest.mark.parametrize(
    "value", ["Kopie (2)", "it's", 'a"b', "grün", "C:\\x (1)\\", 'a\\"b(', "x)", "a;b", "a=b", "~", "#1,"]
)
def test_a_value_that_cannot_be_read_is_read_once_the_fix_is_pasted(value: str) -> None:
    parser = OverridesParser.create()
    with pytest.raises(OverrideParseException) as refused:
        parser.parse_overrides([f"run_dir={value}"])
    (pasted,) = shlex.split(suggestions.explain(refused.value, None).partition("fix: write ")[2])
    assert parser.parse_overrides([pasted])[0].value() == value
