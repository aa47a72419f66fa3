"""Types of the options of the tools in scripts/; see conf/schema.py for those of training."""

from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated

from conf.schema import PluggedConfig
from data.config import Below1, DataConfig
from models.config import ModelConfig
from models.published import PUBLISHED
from train_utils.config import Count, Whole


@dataclass
class CheckDataConfig(PluggedConfig):
    """Everything that scripts/check_data.py reads."""

    image_size: Count  # side of the network's input in training, in pixels
    min_iou: Below1  # recall counts boxes whose IoU with an anchor is higher, as loss.anchor_iou
    pictures: Whole  # images of each set on the contact sheet; 0: draw nothing
    out: str | None  # folder for the report; null: runs/check_data/<name>_<date_time>
    data: DataConfig
    model: ModelConfig

    def __post_init__(self) -> None:
        self.data.check_two_sets()


@dataclass
class ConvertConfig(PluggedConfig):
    """Everything that scripts/convert_weights.py reads; ``weights`` or ``ckpt`` is the source."""

    weights: str | None  # Darknet .weights, or a .pt state dict of another system, for the network of ``model``
    ckpt: str | None  # a checkpoint file, or a run folder (its best.pt)
    out: str  # from weights: a .pt checkpoint; from ckpt, or with up_to_layer: Darknet .weights
    names: str | None  # class names for weights: a text file with one per line, or a COCO json; null: numbers
    image_size: Count | None  # side in pixels that the checkpoint is for; null: that of the .cfg
    up_to_layer: Count | None  # write only layers 0 to up_to_layer - 1, as Darknet's partial command counts
    cfg: str | None  # also write the .cfg that fits the .weights file
    model: ModelConfig  # the network of ``weights``; a checkpoint holds its own


@dataclass
class CompareConfig:
    """Everything that scripts/compare.py reads."""

    runs: list[str]  # folders of runs; the others are compared with the setting of the first; one: its report
    resamples: Annotated[int, ">= 10"]  # of the validation images, by which intervals are found
    seed: Whole  # of the resamples
    debug: bool  # show tracebacks of user errors, too

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("runs is empty. fix: the folders of runs, or of one for its report")


@dataclass
class AnchorsConfig(PluggedConfig):
    """Everything that scripts/anchors.py reads."""

    image_size: Count  # side of the network's input in training, in pixels
    rounds: Whole  # number of rounds of random refinement after k-means
    min_iou: Below1  # recall counts boxes whose IoU with an anchor is higher, as loss.anchor_iou
    out: str | None  # [<folder>/]model/<name>.yaml to write; null: print only
    data: DataConfig
    model: ModelConfig

    def __post_init__(self) -> None:
        if self.out is not None and not PurePath(self.out).match("model/*.yaml"):  # where model= looks
            raise ValueError(f"out must be [<folder>/]model/<name>.yaml, got {self.out}")


@dataclass
class GetDataConfig:
    """Everything that scripts/get_data.py reads."""

    name: str  # of a public data set: coco2017, voc2007 or voc2012
    root: str | None  # folder to unpack into; null: that of the set
    debug: bool  # show tracebacks of user errors, too


@dataclass
class GetWeightsConfig:
    """Everything that scripts/get_weights.py reads."""

    name: str  # of published weights, or list
    debug: bool  # show tracebacks of user errors, too

    def __post_init__(self) -> None:
        if self.name not in ("list", *(names := [entry.name for entry in PUBLISHED])):
            raise ValueError(f"no published weights are called {self.name!r}. fix: list, or one of {', '.join(names)}")


@dataclass
class TuneConfig:
    """Everything that scripts/tune.py reads; what follows ``--`` goes to train.py."""

    name: str  # of the study: its folder is runs/<name>
    trials: Count  # number of trials of the whole study, also those of earlier starts
    prune_after: Whole  # epochs until a trial may be stopped: if its AP is below the median of the earlier ones
    seed: Whole  # of the search; that of the trainings is train.seed
    options: list[str]  # of train.py in every trial: what follows --
    debug: bool  # show tracebacks of user errors, too
