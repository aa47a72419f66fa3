"""A trained network, of a checkpoint or Darknet weights, with its class names and image size."""

from dataclasses import dataclass, replace
from pathlib import Path

import data
import models
from conf import ConfigError
from conf.from_checkpoint import trained_size
from conf.run_files import EXPORTED
from data.errors import printable
from models.published import COCO_NAMES
from train_utils import build, checkpoint
from train_utils.exported_network import ExportedNetwork


@dataclass(frozen=True)
class TrainedNetwork:
    """A trained network on the CPU, in evaluation mode, with one sentence about its origin."""

    model: models.Darknet
    names: list[str]
    category_ids: list[int]  # in the order of names: those of the data set, or 1, 2, ...
    image_size: int | list[int]  # pixels, or height, width
    note: str
    origin: str  # the same without folders of this machine, for files that others get


def open_detector(
    ckpt: str | None, config: models.ModelConfig | None, names: str | None, image_size: int | list[int] | None
) -> TrainedNetwork:
    """The network of ``ckpt`` (open_checkpoint), or of ``config`` with its weights.

    ``names`` is for Darknet weights, which hold none: a text file with one class name a line, or a
    COCO json, whose categories count in the order of their ids; None means those of default_names.
    ``image_size`` None means the size that the checkpoint was evaluated with, or that of the .cfg.
    Raises ConfigError if no weights are given, names and network differ in number, or the image
    size does not suit the network.
    """
    if ckpt is not None:
        opened = open_checkpoint(ckpt)
        opened = replace(opened, image_size=image_size or opened.image_size)
    elif config is None or config.weights is None:
        raise ConfigError("no weights are given. fix: ckpt=<run folder or .pt file>, or model= and model.weights=")
    else:
        class_names, ids = data.read_names(Path(names)) if names is not None else ([], None)
        class_names = list(map(printable, class_names))
        model, report = build.build_model(config, len(class_names) or None, whole=True, names=class_names)
        note = str(report)
        if names is None:
            class_names = default_names(model.num_classes)
            note += f"; without names=, the classes are {class_names[0]} to {class_names[-1]}"
        ids = ids or list(range(1, len(class_names) + 1))
        origin = f"the weights {Path(config.weights).name}"
        opened = TrainedNetwork(
            model.eval(), class_names, ids, image_size or models.image_size_of(model.cfg), note, origin
        )
    check_size(opened.model, opened.image_size, "image_size")
    return opened


def check_size(model: models.Darknet, image_size: int | list[int], key: str) -> None:
    """Raise ConfigError unless the network takes images of this size, the option ``key``."""
    height, width = data.both_sides(image_size)
    if (fits := model.nearest_size(height, width)) != (height, width):
        nearest, stride = (fits[0] if height == width else [*fits]), model.max_stride
        said = f"{key}={image_size} is not a multiple of the network's largest stride {stride}"
        said = said if model.takes_any_size else f"{key}={image_size} is not the size of the exported file"
        raise ConfigError(f"{said}. fix: {key}={nearest}".replace(", ", ","))


def default_names(count: int) -> list[str]:
    """Class names for weights that come without: COCO's own for 80 classes, else numbers."""
    of_coco, _ = data.read_names(COCO_NAMES)
    return of_coco if count == len(of_coco) else [str(index) for index in range(count)]


def open_checkpoint(ckpt: str) -> TrainedNetwork:
    """The averaged network of a checkpoint, or a file of export.py, with its image size.

    That of a checkpoint, the size of its evaluation, can be saved as .weights. Raises
    CheckpointError or ModelError if the content is not what training or export.py wrote.
    """
    if Path(ckpt).suffix in EXPORTED:
        file = ExportedNetwork(Path(ckpt))
        size = file.image_size[0] if file.image_size[0] == file.image_size[1] else file.image_size
        note = f"{ckpt}: an exported file, {len(file.names)} classes"
        return TrainedNetwork(file, file.names, file.category_ids, size, note, Path(ckpt).name)
    state = checkpoint.check_entries(checkpoint.load_checkpoint(Path(ckpt)), ckpt)
    model = models.network_of_checkpoint(state["network"], ckpt, state["ema"])
    major, minor, revision = state["weights_version"]
    model.seen, model.weights_version = state["seen"], (major, minor, revision)
    names, size = list(map(printable, state["names"])), trained_size(state["config"], ckpt)
    origin = (f"epoch {state['epoch']}" if state["epoch"] else "converted weights") + f", {len(names)} classes"
    return TrainedNetwork(model.eval(), names, state["category_ids"], size, f"{ckpt}: {origin}", origin)
