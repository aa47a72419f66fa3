"""train.deterministic=true on CPUs: same weight bits on 1, 2 and 3 ranks, with 1 or 2 threads.

The cases come from the registers of layers, activations and options, so a new one is covered
automatically or reported by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from enum import EnumType
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor

import train as program
from conf.entry import compose
from conf.schema import TrainConfig
from data import AugmentConfig, ShapesConfig, ensure_shapes
from models import Darknet, DarknetLoss, DarknetLossConfig, IouKind, LossConfig, YoloLoss, parse_cfg
from models.cfg.keys import NET, SECTION_KEYS
from models.config import Balance, PositivesBy
from models.network.activations import ACTIVATIONS
from tests.models.cfg_writer import cfg, conv, head, route, section, shortcut
from tests.runs.process_group import run_group
from tests.train_utils.small_training import CONFIG, Batch, new_state, train_epoch
from train_utils.config import OptimConfig, Precision, TrainSection
from train_utils.distributed import init_distributed_mode
from train_utils.errors import TrainError
from train_utils.optim import Schedule
from train_utils.parallel.wrap import convert_sync_batchnorm, wrap_model
from train_utils.processes.world import World
from train_utils.run.checkpoint import load_checkpoint
from train_utils.run.same_training import WITHOUT_EFFECT

THREADS = {1: (1, 2), 2: (2,), 3: (1,)}  # by ranks; another pair would repeat what these show
STEPS, BATCH, SIDE = 2, 6, 40  # 10 x 10 cells times odd channels: no multiple of a vector's width

# Lines that use all options of each section type; each is a network between two convolutions.
LAYERS = {
    "convolutional": [
        conv(7, 3, 2, "mish", groups=1, padding=1, pad=0), conv(14, 3, groups=7, dilation=2, stride_x=1, stride_y=1),
        conv(7, 3, xnor=1), conv(7, 3, xnor=1, batch_normalize=0, activation="swish"), conv(7, 3, cbn=1),
        conv(7, 3, antialiasing=1, stride=1) + conv(7, 3) + conv(7, 3, share_index=-1, activation="logistic"),
    ],
    "shortcut": [
        shortcut(-2, weights_type=kind, weights_normalization=how, activation="swish")
        for kind, how in (("none", "none"), ("per_feature", "relu"), ("per_channel", "softmax"))
    ],
    "route": [route(-1, -2) + conv(8), conv(8) + route(-1, groups=2, group_id=1) + conv(7)],
    "upsample": [section("upsample", stride=2, scale=0.3) + section("upsample", stride=-2, scale=0.3)],
    "maxpool": [
        section("maxpool", size=3, stride_x=1, stride_y=1), section("maxpool", size=2, stride=1, padding=1),
        conv(14) + section("maxpool", maxpool_depth=1, out_channels=7),
        section("maxpool", size=3, stride=1, antialiasing=1),
    ],
    "local_avgpool": [section("local_avgpool", size=3, stride=1, stride_x=1, stride_y=1, padding=2)],
    "avgpool": [section("avgpool") + conv(7, 1) + section("scale_channels", **{"from": -3}, activation="logistic")],
    "sam": [conv(7, activation="logistic") + section("sam", **{"from": -2}, activation="swish")],
    "scale_channels": [],  # behind avgpool
    "dropout": [
        section("dropout", probability=0.3),
        section("dropout", probability=0.2, dropblock=1, dropblock_size_abs=3, dropblock_size_rel=0.1),
    ],
    "reorg": [conv(8) + section("reorg", stride=2) + section("upsample", stride=2)],
    "reorg3d": [section("reorg3d", stride=2) + section("upsample", stride=2)],
    "yolo": [],  # the heads of all
}  # fmt: skip
HEADS = [
    head(0, 1), head(0, 1, num=3, scale_x_y=1.2, new_coords=1, activation="logistic"),
    head(0, 1, iou_loss="ciou", iou_normalizer=0.1, cls_normalizer=0.5, obj_normalizer=0.4, ignore_thresh=0.3),
    head(0, 1, iou_loss="mse", truth_thresh=0.6, iou_thresh=0.3, label_smooth_eps=0.1),
]  # fmt: skip
ACTIVATIONS_EACH, LINES_EACH = 8, 3  # per network: with more, a failure is harder to locate


def networks() -> Iterator[str]:
    """The .cfg files to train: each has some of the activations or some of the lines above."""
    names = list(ACTIVATIONS)
    layers = [conv(7, 3, activation=name, batch_normalize=number % 2) for number, name in enumerate(names)]
    middles = ["".join(part) for part in parts_of(layers, ACTIVATIONS_EACH)]
    middles += [
        conv(7).join(part) for part in parts_of([line for lines in LAYERS.values() for line in lines], LINES_EACH)
    ]
    for number, middle in enumerate(middles):
        yield cfg(conv(7, 3, 2), conv(7, 3), middle, conv(9, 3, 2), HEADS[number % len(HEADS)], side=SIDE)


def parts_of(lines: list[str], length: int) -> list[list[str]]:
    return [lines[start : start + length] for start in range(0, len(lines), length)]


def digest(tensors: dict[str, Tensor]) -> str:
    content = hashlib.sha256()
    for name in sorted(tensors):
        content.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return content.hexdigest()


def trained_network(text: str, number: int, world: World) -> str:
    """The bits of a network after some steps on this rank's noise, one image without objects."""
    torch.manual_seed(number)
    model = Darknet(parse_cfg(text, "case.cfg")).to(memory_format=torch.channels_last)
    model.init_head_biases()
    convert_sync_batchnorm(model, world)
    schedule = Schedule(CONFIG, steps_per_epoch=STEPS, total_steps=STEPS)
    state = new_state(model, schedule)
    wrapped = wrap_model(model, world, seed=5)
    loss: Any = DarknetLoss(model.heads)
    if number % 2:
        loss = YoloLoss(
            model.heads,
            LossConfig(
                "yolov3",
                3.5,
                64.0,
                37.0,
                IouKind.ciou,
                0.2,
                None,
                Balance.equal,
                PositivesBy.shape,
                None,
            ),
        )
    generator = torch.Generator().manual_seed(number)
    images = torch.randint(0, 256, (STEPS, BATCH, 3, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    boxes = torch.rand((STEPS, BATCH, 2, 6), generator=generator) * 20 + 5
    loader = []
    for step in range(STEPS):
        own = list(range(BATCH))[world.rank :: world.world_size]
        rows = [
            torch.cat([torch.tensor([at, i % 2.0]), box[2:]]) for at, i in enumerate(own) if i for box in boxes[step][i]
        ]
        targets = torch.stack(rows) if rows else torch.zeros(0, 6)
        loader.append(
            Batch(images[step][own].contiguous(memory_format=torch.channels_last), targets, torch.tensor(own))
        )
    train_epoch(world, state, schedule, loader, loss=loss, model=wrapped)
    return digest(
        model.state_dict() | {f"ema.{key}": value for key, value in state.average.module.state_dict().items()}
    )


def train_networks() -> dict[str, str]:
    world = init_distributed_mode("cpu", 60)
    found = {}
    for threads in THREADS[world.world_size]:
        torch.set_num_threads(threads)
        for number, text in enumerate(networks()):
            found[f"{threads} threads: {text}"] = trained_network(text, number, world)
    return found


def test_every_option_of_every_layer_is_tried() -> None:
    tried: dict[str, set[str]] = {kind: set() for kind in SECTION_KEYS}
    for text in networks():
        for part in parse_cfg(text, "case.cfg").layers:
            tried[part.kind] |= part.options.keys()
    missing = {kind: sorted(keys.used - tried[kind]) for kind, keys in SECTION_KEYS.items() if kind != NET}
    assert {kind: keys for kind, keys in missing.items() if keys} == {}
    assert LAYERS.keys() == SECTION_KEYS.keys() - {NET}


def test_networks_of_all_layers_and_activations() -> None:
    compare(train_networks)


def compare(function: Any, *arguments: Any) -> None:
    """Run ``function`` on groups of all sizes and require equal values for keys after the colon."""
    expected: dict[str, str] = {}
    different = []
    for processes in THREADS:
        ranks = run_group(function, processes, *arguments)
        assert all(found == ranks[0] for found in ranks), "the ranks of one training differ"
        for key, value in ranks[0].items():
            case = key.split(": ", 1)[1]
            if expected.setdefault(case, value) != value:
                different.append(f"{processes} processes, {key}")
    assert len(set(expected.values())) == len(expected) > 2
    assert different == [], f"{len(different)} trainings differ"


# Values to try for options whose type does not suggest one; ranges are in the dataclasses.
VALUES: dict[str, list[Any]] = {
    "train.epochs": [1, 2], "train.extended_after": [[], [1]],
    "train.batch_size": [6], "train.image_size": [64], "train.multi_scale": [[0.5, 1.5]],
    "train.seed": [3], "train.precision": [Precision.float64, Precision.bfloat16, Precision.float32],
    "augment.close_mosaic_epochs": [0], "augment.tile_pool": [4, 2, 8],
    "augment.degrees": [20.0], "augment.shear": [8.0], "augment.perspective": [0.02], "augment.scale": [0.3],
    "augment.mosaic": [1.0, 0.0], "augment.mosaic_nine": [0.5, 0.0], "optim.lr": [0.02],
    "optim.burn_in_epochs": [0.0], "optim.burn_in_min_steps": [0], "optim.weight_decay": [0.01],
    "optim.clip_norm": [1.0, None], "optim.ema_window": [2.0],
    "loss.iou": ["ciou", "iou"], "loss.anchor_iou": [0.1, 0.5],
    "loss.positives": [10, None, None, 10], "loss.positives_by": ["alignment", "shape", "shape", "cost"],
    "loss.balance": ["pooled", "damped"], "loss.class_weights": ["auto", None],
}  # fmt: skip
LOSSES: dict[str, type] = {"yolov3": LossConfig, "darknet": DarknetLossConfig}
SECTIONS: dict[str, type] = {"train": TrainSection, "augment": AugmentConfig, "optim": OptimConfig}
SHAPES = ShapesConfig(train_images=13, val_images=1, image_size=64, seed=0)  # two steps of 6, and one that fills none


def alternatives(section: str, kind: type) -> Iterator[tuple[str, list[Any]]]:
    """The values to try for each option that changes the weights."""
    for name, annotation in get_type_hints(kind).items():
        key = f"{section}.{name}"
        if key in WITHOUT_EFFECT or name == "name" or key in ("train.sync_bn", "train.compile"):
            continue
        by_type: dict[Any, list[Any]] = {bool: [True, False], float: [0.5], int: [2]}
        if isinstance(annotation, EnumType):
            by_type[annotation] = list(annotation)
        yield key, VALUES.get(key, by_type.get(annotation, [0.4]))


def option_lists() -> list[list[str]]:
    """Command lines that together use all values of each option."""
    found: list[list[str]] = []
    for loss, optim in (("yolov3", "sgd"), ("yolov3", "adamw"), ("darknet", "sgd"), ("yolov3", "sgd")):
        table = dict(alternatives("loss", LOSSES[loss]))
        for name, kind in SECTIONS.items():
            table |= dict(alternatives(name, kind))
        chosen = {key: values[len(found) % len(values)] for key, values in table.items()}
        texts = [f"{key}={'null' if value is None else value}" for key, value in chosen.items()]
        found.append([f"loss={loss}", f"optim={optim}", *texts])
    return found


def train_options(folder: Path) -> dict[str, str]:
    world = init_distributed_mode("cpu", 60)
    setattr(program, "init_distributed_mode", lambda *_: world)  # noqa: B010 - the program only imports it
    found = {}
    drawn = ", ".join(f"{key}: {value}" for key, value in vars(SHAPES).items())
    for threads in THREADS[world.world_size]:
        torch.set_num_threads(threads)
        for number, changed in enumerate(option_lists()):
            run_dir = folder / f"run_{world.world_size}_{threads}_{number}"
            given = [
                "data=shapes", f"data.root={folder / 'shapes'}", f"data.index_dir={folder / 'index'}", "data.workers=0",
                f"data.shapes={{{drawn}}}", "model=base", f"model.cfg={folder / 'net.cfg'}",
                "model.anchors=auto",
                "train.device=cpu", "train.deterministic=true", "train.max_nonfinite_steps=0",
                "evaluate.confidence=0.9", "logger.pictures=false", f"run_dir={run_dir}",
            ]  # fmt: skip
            if "loss=darknet" in changed:
                given += ["model.freeze=2"]  # to the end
            if "loss.positives=10" in changed:
                given += ["model.scale_x_y=2"]
            program.train(compose("train", TrainConfig, [*given, *changed]))
            state = load_checkpoint(run_dir / "checkpoints" / "last.pt")
            kept = state["optimizer"]["state"].items()
            momentum = {f"{key}.{name}": tensor for key, tensors in kept for name, tensor in tensors.items()}
            average = {f"ema.{key}": value for key, value in state["ema"].items()}
            found[f"{threads} threads: {' '.join(changed)}"] = digest(state["model"] | average | momentum)
    return found


@pytest.mark.slow
def test_every_option_of_a_training(tmp_path: Path) -> None:
    """Set all options that change weights; the images per pass are those of one rank."""
    ensure_shapes(tmp_path / "shapes", SHAPES)
    middle = conv(9, 3, 2, "mish") + section("dropout", probability=0.2) + conv(9, 3, 2, "swish")
    (tmp_path / "net.cfg").write_text(cfg(conv(7, 3, 2), middle, head(0, 1), side=64))
    compare(train_options, tmp_path)


@pytest.mark.parametrize("option", ["train.sync_bn=false"])
def test_what_depends_on_the_processes_is_refused_by_name(option: str) -> None:
    key, value = option.split("=")
    given = ["data=shapes", "model=yolov3-tiny", "train.deterministic=true", option]
    with pytest.raises(TrainError, match=rf"train\.deterministic=true .*{key}={value} .*fix: {key}="):
        program.train(compose("train", TrainConfig, [*given, "train.device=cpu"]))
