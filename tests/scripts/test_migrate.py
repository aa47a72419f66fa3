"""Options of other systems as an experiment: what train.py composes from it."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from conf.entry import compose
from conf.failures import ConfigError
from conf.schema import TrainConfig
from conf.schema_tools import MigrateConfig
from scripts.migrate import migrate
from scripts.migrate.python_file import UnreadError, read_python

ARGS = """
task: detect
model: yolov8n.pt
data: set/data.yaml
epochs: 50
batch: 16
imgsz: 512
optimizer: {optimizer}
lr0: 0.02
momentum: 0.9
weight_decay: 0.001
lrf: 0.01
cos_lr: true
nbs: 64
dfl: 1.5
mosaic: 0.9
perspective: 0.0001
multi_scale: true
cache: true
conf: null
fraction: 0.5
bgr: 0.0
plots: true
"""
OPT = (
    "weights: yolov3-spp.pt\ndata: nowhere.yaml\nepochs: 10\nbatch_size: 32\nimgsz: 320\noptimizer: Adam\n"
    "noautoanchor: false\n"
)
HYP = "lr0: 0.001\nbox: 0.05\ncls: 0.5\nobj: 1.0\nanchor_t: 4.0\nfl_gamma: 1.5\niou_t: 0.25\nweight_decay: 0.0005\n"
CFG = """[net]
batch=64
subdivisions=16
width=416
height=320
learning_rate=0.0026
burn_in=1000
max_batches=20
momentum=0.949
decay=0.0004
policy=steps
steps=10,15
scales=.1,.5
angle=7
saturation=1.5
exposure=1.25
hue=.1
mosaic=1
[convolutional]
filters=18
size=1
stride=1
activation=linear
[yolo]
mask=0,1,2
anchors=10,14, 23,27, 37,58
classes=1
jitter=.3
random=1
"""


BASE = """
default_hooks = dict(param_scheduler=dict(type='YOLOv5ParamSchedulerHook', scheduler_type='cosine', lr_factor=0.05))
img_scale = (640, 512)
model = dict(type='YOLODetector', test_cfg=dict(nms=dict(type='nms', iou_threshold=0.65), max_per_img=300))
train_cfg = dict(max_epochs=300, by_epoch=True, gone=1)
"""
MMYOLO = """
import os
_base_ = ['base.py']
os.system('touch ran')
names = ('cat', 'dog')
bs = 4 * 4 + len(names) - 2
cut = [dict(type='Mosaic', prob=0.75, img_scale=_base_.img_scale)]
train_pipeline = [*cut, dict(type='YOLOv5RandomAffine', scaling_ratio_range=(0.6, 1.3), max_shear_degree=2),
                  dict(type='mmdet.Albu', transforms=open('x')), dict(type='PPYOLOERandomCrop')]
train_dataloader = dict(batch_size=bs, num_workers=4, dataset=dict(
    type='YOLOv5CocoDataset', data_root='cats', metainfo=dict(classes=names), ann_file='a/train.json',
    data_prefix=dict(img='pictures/'), pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(type='YOLOv5CocoDataset', data_root='cats', ann_file='a/val.json'))
optim_wrapper = dict(type='OptimWrapper', clip_grad=dict(max_norm=35), optimizer=dict(
    type='SGD', lr=0.01 / 2, momentum=0.937, weight_decay=0.0005, nesterov=True, batch_size_per_gpu=bs))
train_cfg = dict(_delete_=True, max_epochs=40, val_interval=10)
custom_hooks = [dict(type='EMAHook')]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set" / "images").mkdir(parents=True)
    (tmp_path / "set" / "data.yaml").write_text("train: images\nval: images\nnames: [a]\n")
    return tmp_path


def migrated(**texts: str) -> tuple[TrainConfig, str]:
    """What train.py composes, and the lines on options without a counterpart."""
    files = []
    for name, text in texts.items():
        stem, _, suffix = name.rpartition("_")
        Path(f"{stem}.{suffix}").write_text(text)
        files.append(f"{stem}.{suffix}")
    text = migrate(MigrateConfig(files, "mine.yaml", False))
    return compose("train", TrainConfig, ["experiment=mine.yaml"]), text.partition("# Without a counterpart")[2]


def test_ultralytics(folder: Path) -> None:
    config, left = migrated(args_yaml=ARGS.format(optimizer="SGD"))
    assert config.data.root == str(folder / "set" / "data.yaml") and config.data.cache == "ram"
    train, optim, augment = config.train, config.optim, config.augment
    assert (train.epochs, train.batch_size, train.image_size, train.multi_scale) == (50, 64, 512, [0.5, 1.5])
    assert (optim.name, optim.lr, optim.momentum, optim.weight_decay) == ("sgd", 0.02, 0.9, 0.001)
    assert (optim.final_lr_ratio, optim.decay, optim.burn_in_min_steps) == (0.01, "cosine", 25)
    assert optim.flat_fraction == 0, "the rate falls from the start there"
    assert (augment.mosaic, augment.perspective) == (0.9, pytest.approx(0.0512))
    assert all(name in left for name in ("model: yolov8n", "dfl: 1.5", "fraction: 0.5"))
    assert not any(name in left for name in ("plots", "conf:", "bgr", "nbs", "task"))


def test_ultralytics_chose_its_optimiser_itself() -> None:
    config, left = migrated(args_yaml=ARGS.format(optimizer="auto"))
    assert (config.optim.name, config.optim.lr) == ("sgd", 0.01) and "optimizer: auto" in left


@pytest.mark.parametrize(
    ("line", "expected", "said"),
    [
        ("batch: 0.7", {"train.batch_size": 64, "optim.weight_decay": 0.001}, "batch: 0.7 (train.device_batch_size"),
        ("batch: -1", {"train.batch_size": 64}, "batch: -1"),
        ("batch: 24", {"train.batch_size": 72, "optim.weight_decay": 0.001125}, ""),
        ("imgsz: [480, 320]", {"train.image_size": 480}, ""),
        ("multi_scale: 0.25", {"train.multi_scale": [0.75, 1.25]}, ""),
        ("cls_pw: 0.0", {"loss.class_positive_weight": 1.0}, ""),  # another thing than YOLOv5's
        ("cls_pw: 0.5", {"loss.class_positive_weight": 1.0}, "cls_pw: 0.5"),
        ("scale: 1.0\nperspective: 0.0", {"augment.scale": 0.99}, ""),
        ("perspective: 0.001", {"augment.perspective": 0.19}, ""),
        ("classes: 0", {}, "classes: [0] (only these were trained"),
        ("classes: [0, 2]", {}, "classes: [0, 2] (only these were trained"),
        ("name: train3", {"name": "set"}, ""),
        ("name: 'rf #1: ü'", {"name": "rf #1: ü"}, ""),
        ("auto_augment: randaugment", {}, ""),
        ("fraction: 1.0", {}, ""),
    ],
)
def test_ultralytics_values(line: str, expected: dict[str, Any], said: str) -> None:
    key, *more = (each.partition(":")[0] for each in line.splitlines())
    lines = [each for each in ARGS.format(optimizer="SGD").splitlines() if each.partition(":")[0] not in (key, *more)]
    config, left = migrated(args_yaml="\n".join([*lines, line]))
    assert {name: OmegaConf.select(OmegaConf.structured(config), name) for name in expected} == expected
    assert said in left if said else f"{key}:" not in left


def test_a_set_that_is_not_here_is_said_and_its_path_survives_yaml(folder: Path) -> None:
    (folder / "a #1: b").mkdir()
    for place in ("a #1: b/data.yaml", "C:\\me\\data.yaml"):
        with pytest.raises(MissingConfigException, match="Could not find"):
            migrated(args_yaml=f"epochs: 3\ndata: '{place}'\n")
        assert f"no such file here: data=<where {place} is now>" in Path("mine.yaml").read_text()
        Path("mine.yaml").unlink()
    shutil.copy("set/data.yaml", "a #1: b")
    (folder / "a #1: b" / "images").mkdir()
    config, _ = migrated(args_yaml="epochs: 3\ndata: 'a #1: b/data.yaml'\n")
    assert config.data.root == str(folder / "a #1: b" / "data.yaml")


def test_yolov5() -> None:
    with pytest.raises(Exception, match=r"nowhere\.yaml"):
        migrated(opt_yaml=OPT, hyp_yaml=HYP)
    Path("mine.yaml").unlink()
    config, left = migrated(opt_yaml=OPT.replace("nowhere", "set/data"), hyp_yaml=HYP)
    usual: Any = compose("train", TrainConfig, []).loss
    assert config.train.batch_size == 64 and config.model.cfg == "yolov3-spp" and config.model.anchors == "auto"
    assert (config.optim.name, config.optim.lr) == ("adamw", 0.001)
    assert config.loss == replace(usual, focal_gamma=1.5), "its gains are those of sums over a step"
    assert all(f"{key}: " in left for key in ("box", "cls", "obj", "anchor_t", "iou_t"))
    Path("both.yaml").write_text(OPT.replace("nowhere", "set/data") + "hyp:\n" + textwrap.indent(HYP, "  "))
    texts = [migrate(MigrateConfig(files, None, False)) for files in (["both.yaml"], ["opt.yaml", "hyp.yaml"])]
    assert texts[0].replace("both.yaml", "opt.yaml and hyp.yaml") == texts[1]


def test_a_set_beside_the_file_comes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder / "home"))
    shutil.copytree("set", "home/set")
    Path("home/args.yaml").write_text(ARGS.format(optimizer="SGD"))
    assert str(folder / "home" / "set" / "data.yaml") in migrate(MigrateConfig(["~/args.yaml"], None, False))


def test_darknet(folder: Path) -> None:
    Path("obj.names").write_text("a\n")
    Path("train.txt").write_text("".join(f"set/images/{number}.jpg\n" for number in range(100)))
    data = "classes=1\ntrain=train.txt\nvalid=train.txt\nnames=obj.names\nbackup=backup/\n"
    config, left = migrated(obj_data=data, my_cfg=CFG)
    assert config.data.root == str(folder / "obj.data") and config.model.cfg == str(folder / "my.cfg")
    train, optim, augment = config.train, config.optim, config.augment
    assert (train.epochs, train.batch_size, train.device_batch_size, train.image_size) == (13, 64, 4, 416)
    assert (optim.lr, optim.momentum, optim.weight_decay, optim.ema_decay) == (0.0026, 0.949, 0.0004, 0)
    assert (optim.final_lr_ratio, optim.burn_in_min_steps, optim.burn_in_epochs) == (pytest.approx(0.05), 1000, 0)
    assert optim.flat_fraction == 0
    assert (augment.hsv_saturation, augment.hsv_value, augment.hsv_hue, augment.degrees) == (0.5, 0.25, 0.1, 7)
    assert (augment.mosaic, augment.flip_horizontal, augment.translate) == (0.5, 0.5, 0.3)
    assert config.loss.name == "darknet" and config.evaluate.resize == "stretch" and train.multi_scale == [0.71, 1.4]
    assert all(name in left for name in ("policy: steps", "steps: 10,15", "backup: backup/"))
    Path("mine.yaml").unlink()
    text = CFG.replace("max_batches=20\n", "").replace("subdivisions=16", "subdivisions=128")
    text = text.replace("width=416", "width=96").replace("height=320", "height=160")
    config, left = migrated(obj_data=data, my_cfg=text)
    assert config.train.image_size == 160
    usual = compose("train", TrainConfig, []).train
    assert (config.train.epochs, config.train.device_batch_size) == (usual.epochs, usual.device_batch_size)
    assert "max_batches: the .cfg has none" in left


def test_mmyolo(folder: Path) -> None:
    Path("base.py").write_text(BASE)
    config, left = migrated(y_8xb16_py=MMYOLO)
    train, optim, augment, data = config.train, config.optim, config.augment, config.data
    assert not (folder / "ran").exists()
    assert (data.root, data.train.annotations, data.train.images) == ("cats", "a/train.json", "pictures/")
    assert (data.val.annotations, data.names, data.workers) == ("a/val.json", ["cat", "dog"], 4)
    assert (train.epochs, train.batch_size, train.image_size, config.evaluate.every) == (40, 128, 640, 10)
    assert (optim.lr, optim.weight_decay, optim.clip_norm) == (0.005, 0.001, 35)  # 128 images: twice the decay
    assert (optim.decay, optim.final_lr_ratio, optim.flat_fraction) == ("cosine", 0.05, 0)
    assert (augment.mosaic, augment.scale, augment.shear) == (0.75, 0.4, 2)
    assert (config.evaluate.nms_iou, config.evaluate.max_detections) == (0.65, 300)
    assert all(name in left for name in ("custom_hooks", "Albu.transforms", "model: YOLODetector", "PPYOLOERandomCrop"))
    assert "gone" not in left
    Path("mine.yaml").unlink()
    without = MMYOLO.replace("[*cut, dict(", "[dict(").replace("type='SGD'", "type='AdamW'")
    without = without.replace("dataset=dict(\n", "dataset=dict(type='Mix', dataset=dict(\n").replace(
        "_pipeline))", "_pipeline)))"
    )
    config, _ = migrated(y_py=without)
    assert (config.augment.mosaic, config.optim.name, config.data.train.annotations) == (0, "adamw", "a/train.json")
    assert (config.train.batch_size, config.optim.weight_decay) == (16, 0.0005)  # four times 16 images to a step


def test_python_is_read_without_running_it(folder: Path) -> None:
    """What is no constant stays text, alone, and so does what is computed from it."""
    Path("a.py").write_text(
        "import os\n"
        "size = (640, 512)\n"
        "more = dict(a=1)\n"
        "most = {'d': 2.5}\n"
        "both = dict(type='x', b=open('ran', 'w'), **more, **most, **{'c': [*size, 2 * size[1] - len(size)]})\n"
        "cores = os.cpu_count()\n"
        "least = min(cores, 4)\n"
        "of_text = [cores * 2, 'a' + cores, cores + 'a', more.a + 1, -more['a']]\n"
        "unread = [f'{cores}', 'a' if cores == 4 else 'b', cores[0], len(cores), [*cores], not cores, cores or 1]\n"
        "unread = [*unread, cores in 'os', size.append(3), more.pop('a'), more.pop, 'a'.join(['b'])]\n"
        "unread = [*unread, [i for i in size]]\n"
        "huge = [10**9 * 'a', 9**9**9, [0] * 10**9]\n"
        "code = ().__class__.__base__.__subclasses__()\n"
    )
    read = read_python(Path("a.py"))
    assert read["both"] == {"type": "x", "b": read["both"]["b"], "a": 1, "d": 2.5, "c": [640, 512, 1022]}
    assert read["of_text"][3:] == [2, -1] and not Path("ran").exists()
    texts = [
        read["both"]["b"],
        read["cores"],
        read["least"],
        *read["of_text"][:3],
        *read["huge"],
        read["code"],
        *read["unread"],
    ]
    assert all(isinstance(text, UnreadError) for text in texts), texts
    assert str(read["both"]["b"]) == "open('ran', 'w')"
    assert str(read["of_text"][1]) == "'a' + cores" and str(read["huge"][1]) == "9 ** 9 ** 9"
    assert (read["size"], read["more"]) == ([640, 512], {"a": 1}) and len(read["unread"]) == 13


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a_yaml": "task: segment\nepochs: 3\n"}, "task=segment is not detection. fix: "),
        ({"a_yaml": "path: x\n"}, "holds neither epochs nor lr0. fix: "),
        ({"a_yaml": "epochs: 3\nbatch: x\n"}, "batch, nbs or imgsz is no number. fix: "),
        ({"a_txt": ""}, "a.txt is not enough, or of no known system. fix: "),
        ({"my_cfg": CFG}, "my.cfg is not enough, or of no known system. fix: "),
        ({"obj_data": "classes=1\n"}, "fix: args.yaml, opt.yaml and hyp.yaml, a .cfg with its .data (whose "),
        (
            {"a_py": "train_dataloader = {}\nmodel = dict(bbox_head=dict(type='YOLOv5InsHead'))\n"},
            "YOLOv5InsHead is not for upright boxes",
        ),
        ({"a_py": "x = 1\n"}, "has no train_dataloader. fix: "),
        ({"a_py": "train_dataloader = dict(batch_size=f(2))\n"}, "batch_size is f(2), which was not computed. fix: "),
        ({"a_py": "_base_ = f(2)\n"}, "f(2) cannot be read"),
        ({"a_py": "_base_ = 'a.py'\n"}, "includes itself by _base_. fix: "),
        ({"a_py": "_base_ = 'b.py'\n"}, "b.py cannot be read"),
        ({"a_py": "def (\n"}, "is no Python file"),
    ],
)
def test_what_is_no_other_system_is_named(files: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as found:
        migrated(**files)
    assert said in str(found.value)


def test_nothing_is_overwritten() -> None:
    Path("mine.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"out=mine\.yaml exists"):
        migrated(args_yaml=ARGS)
