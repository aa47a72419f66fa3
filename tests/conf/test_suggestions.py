"""What people type who know another program, and files that are nearly there: the answers."""

from __future__ import annotations

import re
import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

from conf import REPOSITORY, ConfigError
from conf.cli import suggestions
from conf.cli.program import PROGRAMS, prepare_arguments
from conf.compose import compose

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
    "thing=0.5": (),
    "optim.learning_rate=0.1": ("optim.lr=0.1",),
    "model=/data/my.cfg": ("model.cfg=/data/my.cfg",),
    "ckpt=tiny.weights": ("ckpt= model.cfg=tiny.cfg model.weights=tiny.weights", "model.weights=tiny.weights"),
}

# What each key of Ultralytics' default.yaml means with a usual value: to train.py, to predict.py.
# "": there is no option for it, and the answer says what to do; ok: it is an option here.
ULTRALYTICS = {
    "epochs=100": ("train.epochs=100", ""),
    "patience=100": ("train.patience=100", ""),
    "batch=16": ("train.batch_size=16", "batch_size=16"),
    "imgsz=640": ("train.image_size=640", "image_size=640"),
    "save=True": ("", "draw=True"),
    "save=False": ("", "draw=False"),
    "cache=True": ("data.cache=ram", ""),
    "cache=False": ("data.cache=none", ""),
    "cache=disk": ("data.cache=disk", ""),
    "device=0": ("train.device=cuda", "device=cuda"),
    "device=cpu": ("train.device=cpu", "ok"),
    "workers=8": ("data.workers=8", "ok"),
    "project=mine": ("run_dir=mine", "out=mine"),
    "project=mine name=exp1": ("run_dir=mine/exp1", "out=mine/exp1"),
    "name=exp1": ("ok", "out=exp1"),
    "optimizer=AdamW": ("optim=adamw", ""),
    "seed=0": ("train.seed=0", ""),
    "deterministic=True": ("train.deterministic=True", ""),
    "single_cls=True": ("data.single_class=True", ""),
    "rect=True": ("train.rect=True", "ok"),
    "cos_lr=True": ("optim.decay=cosine", ""),
    "cos_lr=False": ("optim.decay=linear", ""),
    "close_mosaic=10": ("augment.close_mosaic_epochs=10", ""),
    "resume=True": ("resume=auto", ""),
    "resume=False": ("resume=null", ""),
    "amp=True": ("train.precision=auto", "precision=auto"),
    "amp=False": ("train.precision=float32", "precision=float32"),
    "freeze=10": ("model.freeze=10", ""),
    "multi_scale=0.25": ("train.multi_scale=[0.75,1.25]", ""),
    "multi_scale=True": ("train.multi_scale=[0.5,1.5]", ""),
    "multi_scale=False": ("train.multi_scale=[1,1]", ""),
    "compile=True": ("train.compile=default", ""),
    "compile=False": ("train.compile=off", ""),
    "val=True": ("evaluate.every=1", ""),
    "val=False": ("evaluate.every=0", ""),
    "iou=0.7": ("evaluate.nms_iou=0.7", "nms_iou=0.7"),
    "conf=0.3": ("evaluate.confidence=0.3", "confidence=0.3"),
    "max_det=300": ("evaluate.max_detections=300", "max_detections=300"),
    "half=True": ("train.precision=float16", "precision=float16"),
    "half=False": ("train.precision=float32", "precision=float32"),
    "plots=False": ("logger.pictures=False", ""),
    "classes=[0,2]": ("data.classes=[0,2]", "ok"),
    "classes=0,2": ("data.classes=[0,2]", "classes=[0,2]"),
    "lr0=0.01": ("optim.lr=0.01", ""),
    "lrf=0.01": ("optim.final_lr_ratio=0.01", ""),
    "momentum=0.937": ("optim.momentum=0.937", ""),
    "weight_decay=0.0005": ("optim.weight_decay=0.0005", ""),
    "warmup_epochs=3.0": ("optim.warmup_epochs=3.0", ""),
    "hsv_h=0.015": ("augment.hsv_hue=0.015", ""),
    "hsv_s=0.7": ("augment.hsv_saturation=0.7", ""),
    "hsv_v=0.4": ("augment.hsv_value=0.4", ""),
    "degrees=10.0": ("augment.degrees=10.0", ""),
    "translate=0.1": ("augment.translate=0.1", ""),
    "scale=0.5": ("augment.scale=0.5", ""),
    "shear=2.0": ("augment.shear=2.0", ""),
    "flipud=0.5": ("augment.flip_vertical=0.5", ""),
    "fliplr=0.5": ("augment.flip_horizontal=0.5", ""),
    "mosaic=1.0": ("augment.mosaic=1.0", ""),
    "mixup=0.1": ("augment.mixup=0.1", ""),
    "save_json=True": ("", "ok"),
    "save_txt=True": ("", "ok"),
    **dict.fromkeys(["model=yolov8n.pt", "yolo11s.pt"], ("model=yolov4-tiny model.weights=coco",) * 2),
    **dict.fromkeys(
        "task=detect mode=train time=1 save_period=5 device=mps exist_ok=True pretrained=True optimizer=auto "
        "optimizer=RMSProp verbose=True fraction=0.5 profile=False overlap_mask=True mask_ratio=4 dropout=0.1 "
        "split=test dnn=False end2end=True vid_stride=2 stream_buffer=False visualize=True augment=True augment=False "
        "agnostic_nms=True retina_masks=False embed=[12] show=True save_frames=True save_conf=True save_crop=True "
        "show_labels=False show_conf=False show_boxes=True line_width=2 format=torchscript format=engine keras=False "
        "optimize=False int8=True dynamic=True simplify=True opset=17 workspace=4 nms=True nms=1 nms=False "
        "warmup_momentum=0.8 warmup_bias_lr=0.1 cls_pw=1.0 pose=12.0 kobj=1.0 rle=1.0 angle=1.0 nbs=64 "
        "perspective=0.0 bgr=0.0 cutmix=0.1 copy_paste=0.1 copy_paste_mode=flip auto_augment=randaugment erasing=0.4 "
        "cfg=hyp.yaml tracker=botsort.yaml batch=0.7 batch=-1 label_smoothing=0.1".split(),
        ("", ""),
    ),
    "ema=False": ("optim.ema_decay=0", ""),
}
THEIR_MODES = {  # the same of its modes val and export: to eval.py, to export.py
    "imgsz=640": ("evaluate.image_size=640", "image_size=640"),
    "imgsz=[640,480]": ("evaluate.image_size=[640,480]", "image_size=[640,480]"),
    "batch=16": ("evaluate.batch_size=16", "batch_size=16"),
    "conf=0.25": ("evaluate.confidence=0.25", "confidence=0.25"),
    "iou=0.45": ("evaluate.nms_iou=0.45", "nms_iou=0.45"),
    "max_det=300": ("evaluate.max_detections=300", "max_detections=300"),
    "half=True": ("evaluate.precision=float16", "precision=float16"),
    "half=False": ("evaluate.precision=float32", "precision=float32"),
    "device=cpu": ("ok", ""),
    "plots=True": ("ok", ""),
    "rect=True": ("evaluate.rect=True", "evaluate.rect=True"),
    "split=test": ("ok", ""),
    "project=mine": ("out=mine", "out=mine"),
    "single_cls=True": ("data.single_class=True", "data.single_class=True"),
    "classes=[0,2]": ("data.classes=[0,2]", "data.classes=[0,2]"),
    "model=best.pt": ("ckpt=best.pt", "ckpt=best.pt"),
    "format=onnx": ("", "ok"),
    "include=onnx": ("", "format=onnx"),
    "int8=True": ("", "precision=int8"),
    "int8=False": ("", "precision=float32"),
    "dynamic=True": ("", "dynamic_batch=True"),
    "nms=True": ("", "ok"),
    **dict.fromkeys(
        "save_json=True save_txt=True save_conf=True augment=True agnostic_nms=False dnn=False verbose=True "
        "visualize=True keras=False optimize=False simplify=True opset=17 workspace=4 fraction=0.5 format=engine "
        "format=tensorrt format=torchscript format=coreml format=saved_model format=pb format=tflite format=edgetpu "
        "format=tfjs format=paddle format=mnn format=ncnn format=imx format=rknn format=executorch".split(),
        ("", ""),
    ),
}


def options_meant(program: str, typed: str) -> str | None:
    """What ``typed`` means in a program."""
    kinds = suggestions.kinds_of(PROGRAMS[program].schema)
    for options in MEANT[typed]:
        if all(key in kinds for key in re.findall(r"(?<![^ '])([a-z._]+)=", options)):
            return options.removeprefix("ckpt= ")
    return None


@pytest.mark.parametrize("program", ["train", "predict", "eval", "export"])
def test_the_answer_to_an_option_of_ultralytics_can_be_pasted_and_means_the_same(program: str) -> None:
    command_lines: list[dict[str, str]] = []  # by key; several fixes in each, since composing takes a while
    for typed, meant in (ULTRALYTICS if program in ("train", "predict") else THEIR_MODES).items():
        expected = meant[program in ("predict", "export")]
        if expected != "ok":
            fix = answer(program, typed).partition("fix: ")[2]
            pasted = " ".join(shlex.split(fix.partition(" (")[0])) if re.match(r"'?[\w.]+=", fix) else ""
            assert pasted == expected and "--help" not in fix, f"{typed}: {fix}"
        for option in typed.split() if expected == "ok" else expected.split():
            key = option.partition("=")[0].replace("resume", "run_dir")  # which exclude one another
            line = next((one for one in command_lines if key not in one), None)
            command_lines += [] if line is not None else [line := {}]
            line[key] = option
    for options in command_lines:
        others = {"model": "model=yolov3", "data": "data=shapes"}
        others = {"source": "source=x", "model": "model=yolov3"} if program == "predict" else others
        compose(program, PROGRAMS[program].schema, [*(others | options).values()])


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
        if options is None and proposed.startswith("leave it out, it is for "):  # an option of another program
            continue
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
            "train data.classes=[RBC, WBC]",
            "data.classes=[RBC, WBC] is not an option here. fix: 'data.classes=[RBC,WBC]'",
        ),
        ("train logger=csv,tensorboard", "fix: 'logger=[csv,tensorboard]'"),
        ("train devices=0,1", f"fix: devices=2 {GPUS.format('0,1')}"),
        ("train train.epochs: 3", "train.epochs = 3 is not an option: options are key=value here. fix: train.epochs=3"),
        ("train batch=8,16", "fix: -m train.batch_size=8,16"),
        ("train optimizer=RMSProp", "fix: optim takes adamw, darknet or sgd"),
        ("train model=3", "fix: model takes yolov3, yolov3-spp, "),
        ("export format=engine", "fix: give format=onnx, which trtexec, "),
        ("tune data=D epochs=3", "fix: put options of train.py behind --"),
        ("anchors n=9", "fix: --help lists all options"),
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
        if keys.startswith("(leave it out"):  # no counterpart
            continue
        ours, _, note = keys.partition("(")
        ours = "; ".join(filter(None, [_as_code(ours), note.strip(")")]))
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
