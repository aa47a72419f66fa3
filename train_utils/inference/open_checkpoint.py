"""A trained network, of a checkpoint, an exported file or Darknet weights, with names and size."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

import data
import models
from conf import ConfigError, first_line, install_command
from conf.cli.run_files import EXPORTED, NO_WEIGHTS, trained_size
from data.errors import printable
from data.progress import counted
from models import Darknet, ModelConfig, ModelError
from models.config import COCO_NAMES
from models.export import RUNS, read_metadata
from train_utils import build, checkpoint, distributed

BOOLS = "true", "false"
LARGEST = 2**16  # side, stride or batch of an exported file


@dataclass(frozen=True)
class TrainedNetwork:
    """A trained network on the CPU, in evaluation mode, with one sentence about its origin."""

    model: Darknet
    names: list[str]
    category_ids: list[int]  # in the order of names: those of the data set, or 1, 2, ...
    image_size: int | list[int]  # pixels, or height, width
    note: str
    origin: str  # the same without folders of this machine, for files that others get
    trained_on: checkpoint.State = field(default_factory=dict)  # digest of the training set, where it is known
    val: str = "None"  # that of its validation set, as text: a forged value may not compare
    exif: str = "apply"  # data.exif of the training


def open_detector(
    ckpt: str | None, config: ModelConfig | None, names: str | None, image_size: int | list[int] | None
) -> TrainedNetwork:
    """The network of ``ckpt`` (open_checkpoint), or of ``config`` with its weights.

    ``names`` is for Darknet weights, which hold none: a text file with one class name a line, or a
    COCO json, whose categories count in the order of their ids. ``image_size`` None means the size
    of the checkpoint's evaluation, or of the .cfg. Raises ConfigError if no weights are given, or
    names or image size do not suit the network.
    """
    if ckpt is not None:
        network = open_checkpoint(ckpt)
    elif config is not None:
        class_names, ids = data.read_names(Path(names)) if names is not None else ([], None)
        network = open_weights(config, list(map(printable, class_names)), ids)
    else:
        raise ConfigError(*NO_WEIGHTS)
    if image_size is not None:
        network = replace(network, image_size=image_size)
    build.check_size(network.model, network.image_size, "image_size")
    return network


def open_weights(
    config: ModelConfig, names: list[str], category_ids: list[int] | None, world: distributed.World | None = None
) -> TrainedNetwork:
    """The network of ``config`` with Darknet weights; without ``names`` COCO's 80, or numbers."""
    model, report = build.build_model(config, len(names) or None, whole=True, world=world, names=names)
    note = str(report)
    if not names:
        of_coco, _ = data.read_names(COCO_NAMES)
        names = list(report.names) if report is not None else []
        if not names:
            names = of_coco if model.num_classes == len(of_coco) else list(map(str, range(model.num_classes)))
        note += f"; without names=, the classes are {names[0]} to {names[-1]}"
    ids = category_ids or list(range(1, len(names) + 1))
    origin = f"the weights {Path(str(config.weights)).name}"
    return TrainedNetwork(model.eval(), names, ids, models.image_size_of(model.cfg), note, origin)


def open_checkpoint(ckpt: str) -> TrainedNetwork:
    """The averaged network of a checkpoint, or a file of export.py, or an error."""
    if Path(ckpt).suffix in EXPORTED:
        return ExportedNetwork(Path(ckpt)).opened()
    state = checkpoint.check_entries(checkpoint.load_checkpoint(Path(ckpt)), ckpt)
    model = models.network_of_checkpoint(state["network"], ckpt, state["ema"])
    model.seen = state["seen"]
    major, minor, revision = state["weights_version"]
    model.weights_version = major, minor, revision
    names = list(map(printable, state["names"]))
    origin = f"epoch {state['epoch']}" if state["epoch"] else "converted weights"
    origin += f", {counted(len(names), 'class')}"
    size = trained_size(state["config"], ckpt)
    exif = state["config"].get("data", {}).get("exif", "apply")
    ids, note = state["category_ids"], f"{ckpt}: {origin}"
    sets = state.get("data", {}), repr(state.get("val"))
    return TrainedNetwork(model.eval(), names, ids, size, note, origin, *sets, exif)


class Facts(msgspec.Struct):
    """What a file of export.py says about itself."""

    names: list[str]
    category_ids: list[int]
    image_size: list[int]  # height, width
    stride: int
    open: list[str]  # axes of any length: batch, height, width
    batch_size: int = 1
    suppression: dict[str, float] = {}  # limits by option; empty for a file without


def read_facts(path: Path) -> dict[str, Any]:
    """The metadata of a file of export.py, with the keys of Facts. Raises ModelError."""
    with _reading(path):
        texts = read_metadata(path)
        known = {key: json.loads(text) for key, text in texts.items() if text[:1] in '[{"0123456789' or text in BOOLS}
        facts = msgspec.convert(known, Facts)
        sizes = [*facts.image_size, facts.stride, facts.batch_size]
        fits = len(sizes) == 4 and 0 < min(sizes) <= max(sizes) < LARGEST
        if not (fits and 0 < len(facts.names) == len(facts.category_ids)):
            raise ValueError("its names, category_ids and sizes do not fit")
    return {"batch_size": 1, "suppression": {}, **known}


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ModelError(f"{path} needs {error.name}", install_command(str(error.name))) from error
    except Exception as error:  # each runtime has its own for a damaged file
        raise ModelError(f"{path} cannot be read ({first_line(error)})", "a file of export.py") from error


class ExportedNetwork(Darknet):
    """A file in a network's place; it runs on the CPU and decodes, so it has no heads."""

    def __init__(self, path: Path) -> None:
        nn.Module.__init__(self)
        known = read_facts(path)
        with _reading(path):
            self.run = RUNS[path.suffix](path)
        self.path = path
        self.names = list(map(printable, known["names"]))
        self.category_ids = known["category_ids"]
        self.num_classes = len(self.names)
        self.max_stride = known["stride"]
        self.image_size = known["image_size"]
        self.takes_any_size = "height" in known["open"]
        self.batch_size = None if "batch" in known["open"] else known["batch_size"]
        self.limits = known["suppression"]
        self.heads = []
        self.layers = nn.ModuleList()
        self.num_frozen = 0

    def __deepcopy__(self, memo: Any) -> "ExportedNetwork":
        return self

    def opened(self) -> TrainedNetwork:
        """The file with what it says about itself."""
        height, width = self.image_size
        note = f"{self.path}: an exported file, {counted(self.num_classes, 'class')}"
        if not self.takes_any_size:
            note += ", all images at one size (rect=false)"
        note += "".join(f", {key}={limit}" for key, limit in self.limits.items())
        size = height if height == width else self.image_size
        return TrainedNetwork(self, self.names, self.category_ids, size, note, self.path.name)

    def forward(self, images: Tensor) -> list[Tensor]:
        """All boxes_xyxy (batch, n, 4) and scores (batch, n, classes) of images like Darknet's.

        Of a file with suppression these are its detections: each scores for one class alone.
        """
        size = self.batch_size or len(images)
        parts = []
        with _reading(self.path):
            for part in images.contiguous().split(size):  # contiguous: a .pt2 of one batch has fixed strides
                missing = part.new_zeros(size - len(part), *part.shape[1:])
                outputs = self.run(torch.cat((part, missing)) if len(missing) else part)
                parts.append([output[: len(part)] for output in outputs])
            boxes, scores, *classes = [torch.cat(column) for column in zip(*parts, strict=True)]
            if classes:
                of_all = scores.new_zeros(*scores.shape, self.num_classes)
                scores = of_all.scatter_(2, classes[0][..., None].long(), scores[..., None])
            fits = boxes.shape[2:] == (4,) and scores.shape == (*boxes.shape[:2], self.num_classes)
            if not (fits and boxes.isfinite().all() and ((scores >= 0) & (scores <= 1)).all()):
                raise ValueError("its outputs are not finite boxes, and scores of 0 to 1 for its classes")
        return [boxes, scores]

    def nearest_size(self, height: int, width: int) -> tuple[int, int]:
        """The (height, width) of images, in pixels, nearest to these that the file takes."""
        if self.takes_any_size:
            return super().nearest_size(height, width)
        return self.image_size[0], self.image_size[1]
