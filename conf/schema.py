"""Types of the options of all programs.

Fields have no defaults: YAML holds every value once, so a missing key fails by its full name. The
sections stand in data/config.py, models/config.py and conf/train_options.py, and this file puts
them together. conf/compose.py checks the limits of numbers. None of these imports torch.
"""

from dataclasses import dataclass, is_dataclass
from enum import StrEnum
from functools import cache
from pathlib import PurePath
from typing import Annotated, Any, get_args, get_type_hints

from msgspec import Meta

from conf import train_options
from conf.train_options import ImageSize, OptionalSize, Seed
from data.config import AugmentConfig, Below1, Count, DataConfig, Exif, OnBadFile, Resize, Share, Whole
from data.remote import check_bucket, is_remote
from models.config import AutoLossConfig, LossConfig, ModelConfig, NotNegative, YoloLossConfig, YoloxLossConfig
from models.published import PUBLISHED


def _check_devices(devices: Any) -> None:
    if devices not in (None, "auto") and not (type(devices) is int and 1 <= devices <= 1024):
        raise ValueError(
            f"devices must be a number of processes up to 1024, or auto for one on each GPU, got {devices}; the "
            "environment variable CUDA_VISIBLE_DEVICES chooses the GPUs"
        )


@dataclass
class DetectionSection:
    """How images become detections, in evaluation and in prediction."""

    image_size: OptionalSize  # longest side in pixels, or [height, width]; null: as trained, or as in the .cfg
    resize: Resize  # letterbox: keep the aspect ratio and pad; stretch: fill image_size, as Darknet does
    rect: bool  # letterbox each image into a rectangle of its shape; false, or resize=stretch: into image_size
    precision: train_options.EvalPrecision  # of the forward pass; all but float32 round more and are faster on GPUs;
    # auto: float32, in a training, too, so that one precision chooses best.pt
    confidence: Share  # drop detections with this score or less
    nms_iou: Share  # a box suppresses those of its class that overlap it by more than this IoU
    merge_nms: bool  # replace each kept box by the mean of itself and those it suppresses, weighted by score
    max_detections: Count  # per image


Scorer = StrEnum("Scorer", ["auto", "pycocotools", "hotcoco"])


@dataclass
class EvaluateConfig(DetectionSection):
    """How a model is scored (keys ``evaluate.*``)."""

    batch_size: Count  # images in one forward pass of one rank; another number moves scores by rounding, some 2e-6
    clip: bool  # cut boxes at the image edges
    scorer: Scorer  # computes the same metrics, to the bit; auto: hotcoco, which is faster, in a tested version
    every: Whole  # epochs between evaluations in training; 0: only after the last epoch
    multi_label = True  # not an option: each class has its own AP, so a box counts for each class above confidence

    def is_due(self, epoch: int, epochs: int) -> bool:
        """Whether to evaluate after ``epoch`` (from 1): always after the last of the ``epochs``."""
        return epoch == epochs or (self.every > 0 and epoch % self.every == 0)


@dataclass
class PluggedConfig:
    """Options of all programs that plugins can extend."""

    debug: bool  # also show the tracebacks of user errors
    plugins: list[str]  # Python files that add losses, layers, augmentations and more: see docs/develop/extending.md


@dataclass
class TrainConfig(PluggedConfig):
    """Everything that train.py reads."""

    name: str  # folder below runs/
    run_dir: str | None  # null: runs/<name>/<date_time>, under SLURM runs/<name>/slurm-<job id>[-<number>]
    run_mirror: str | None  # address such as s3://bucket/runs/coco: what a resume needs is copied there, too
    resume: str | None  # run folder, its last.pt, a folder of runs (the newest), last (of all), or a run_mirror;
    # auto: that in run_mirror unless it is here, else run_dir, else this job's (SLURM,
    # torchrun), else the newest of this name
    device: train_options.Device  # auto: CUDA if there is a GPU
    devices: Any  # number of processes to start, one for each GPU, or auto (all GPUs); null: only this one
    data: DataConfig
    model: ModelConfig
    augment: AugmentConfig
    loss: LossConfig  # one of CHOICES["loss"]
    optim: train_options.OptimConfig
    train: train_options.TrainSection
    evaluate: EvaluateConfig
    logger: train_options.LoggerConfig

    def __post_init__(self) -> None:
        _check_devices(self.devices)
        if self.run_mirror is not None:
            check_bucket(self.run_mirror, "run_mirror")
        if self.resume is not None and self.run_dir is not None and not is_remote(self.resume):
            raise ValueError("resume continues in its own folder. fix: leave run_dir out")
        self.data.check_two_sets()


# Sections whose keys depend on a choice: the class of each choice, by the `name` in its YAML.
CHOICES: dict[str, dict[str, type]] = {
    "loss": {"auto": AutoLossConfig, "yolov3": YoloLossConfig, "yolox": YoloxLossConfig, "darknet": LossConfig}
}


EvalSplit = StrEnum("EvalSplit", ["val", "test"])


@dataclass
class EvalConfig(PluggedConfig):
    """Everything that eval.py reads; the checkpoint fills in ``data`` and ``model``."""

    ckpt: str | None  # a .pt file, a run folder (its best.pt), a folder of runs (the newest), last (of all)
    split: EvalSplit  # val, or test: what data.yaml has under test, else what is called test where data.val says val
    model_file: str | None  # a file of export.py to score; then ckpt only says on which data
    detections: str | None  # a COCO results file of any system, to score instead of a network
    out: str | None  # folder for scores and detections as JSON, and for plots; null: print only, or
    # runs/eval/<date_time> with plots
    plots: bool  # draw precision and recall, confusions and the first images into the folder plots of out
    device: train_options.Device  # auto: CUDA if there is a GPU
    devices: Any  # as in train.py
    timeout_seconds: train_options.Positive  # as train.timeout_seconds
    data: DataConfig
    model: ModelConfig | None
    evaluate: EvaluateConfig

    def __post_init__(self) -> None:
        _check_devices(self.devices)


@dataclass
class TrainedConfig(PluggedConfig):
    """A trained network: ``ckpt``, or ``model`` with model.weights and ``names``."""

    ckpt: str | None  # a .pt file, a run folder (its best.pt), a folder of runs (the newest), last (of all)
    model: ModelConfig | None
    names: str | None  # class names for Darknet weights: a text file with one per line, or a COCO json;
    # null: COCO's for 80 classes, else numbers

    def __post_init__(self) -> None:
        if self.ckpt is not None and self.names is not None:
            raise ValueError("ckpt and names exclude one another: a checkpoint knows its classes. fix: leave one out")


@dataclass
class DetectConfig(DetectionSection, TrainedConfig):
    """A detector and what it reports."""

    multi_label: bool  # report a box once for each class above confidence
    classes: Any  # report only these, by name or number, as in [person,3]; null: all
    exif: Exif  # apply: turn images upright by their EXIF tag; ignore: read them as stored
    device: train_options.Device  # auto: CUDA if there is a GPU
    workers: Count  # threads that read images


@dataclass
class PredictConfig(DetectConfig):
    """Everything that predict.py reads: ``ckpt``, or ``model`` with weights and ``names``."""

    on_error: OnBadFile  # stop at a file that cannot be read, or skip it with a warning
    batch_size: Count | None  # images in one forward pass; results differ by rounding only; null: 8 on a GPU, else 1
    source: str  # an image, a video, a folder, a quoted pattern, an address (http://.../a.jpg, rtsp://...), or the
    # number of a camera (0)
    out: str | None  # folder for the results; null: runs/predict/<date_time>
    draw: bool  # write copies of the images and videos with boxes
    save_json: bool  # write detections.json (COCO results) and images.json
    save_txt: bool  # write labels/*.txt of images (YOLO)


@dataclass
class DemoConfig(DetectConfig):
    """Everything that scripts/demo.py reads: ``ckpt``, or ``model`` with weights and ``names``."""

    host: str  # the address to listen on; 0.0.0.0: open to other machines, without a password
    port: int | None  # null: the first free one from 7860


ExportFormat = StrEnum("ExportFormat", ["onnx", "openvino", "torch"])
ExportPrecision = StrEnum("ExportPrecision", ["float32", "float16", "int8"])
ExportCheck = StrEnum("ExportCheck", ["boxes", "ap"])


@dataclass
class ExportConfig(TrainedConfig):
    """Everything that export.py reads: ``ckpt``, or ``model`` with weights and ``names``."""

    format: ExportFormat  # onnx, openvino (.xml and .bin), or torch: the network as a .pt2 of torch.export
    precision: ExportPrecision  # of the network in the file; int8: its convolutions but the last, not for torch
    symmetric: bool  # int8 around zero for values, too, as TensorRT wants them; costs some accuracy
    calibration: Count  # training images from which int8 takes the ranges of values
    check: ExportCheck  # boxes: compare the file's with the network's; ap: also score both on the validation images
    max_drop: NotNegative | None  # with check=ap, refuse a file that loses more AP; null: 0.02 for int8, else 0.005
    licence: str | None  # of the weights, for the file's metadata
    out: str | None  # the file to write; null: beside the weights, as <name>.onnx, <name>.xml or <name>.pt2
    image_size: OptionalSize  # side in pixels or [height, width]; null: as evaluated, or as in the .cfg
    batch_size: Annotated[int, Meta(ge=1, le=65536)]  # images in one call of the exported network
    dynamic_batch: bool  # accept any batch size
    dynamic_size: bool  # accept any multiples of the network's stride as height and width
    nms: bool  # output detections instead of all boxes and scores
    confidence: Share  # with nms: drop detections with this score or less
    nms_iou: Share  # a box suppresses those of its class that overlap it by more than this IoU
    max_detections: Count  # per image, with nms
    data: DataConfig | None  # for precision=int8 and check=ap; null: that of the checkpoint
    evaluate: EvaluateConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format is ExportFormat.torch and self.precision is ExportPrecision.int8:
            raise ValueError("format=torch has no int8. fix: format=onnx or format=openvino")
        if self.format is ExportFormat.openvino and self.nms:
            raise ValueError("format=openvino has no nms. fix: nms=false, or format=onnx")


@dataclass
class CheckDataConfig(PluggedConfig):
    """Everything that scripts/check_data.py reads."""

    image_size: ImageSize  # side of the network's input in training in pixels, or [height, width]
    min_iou: Below1  # recall counts boxes whose IoU with an anchor is higher, as loss.anchor_iou
    pictures: Whole  # images of each set on the contact sheet; 0: draw nothing
    out: str | None  # folder for the report; null: runs/check_data/<name>_<date_time>
    data: DataConfig
    model: ModelConfig

    def __post_init__(self) -> None:
        self.data.check_two_sets()


@dataclass
class ConvertConfig(PluggedConfig):
    """Everything that scripts/convert_weights.py reads: ``weights`` or ``ckpt`` to convert."""

    weights: str | None  # Darknet .weights, or a .pt state dict of another system, for the network of ``model``
    ckpt: str | None  # a .pt file, a run folder (its best.pt), a folder of runs (the newest), last (of all)
    out: str  # from weights: a .pt checkpoint; from ckpt, or with up_to_layer: Darknet .weights
    names: str | None  # class names for weights: a text file with one per line, or a COCO json; null: as in predict.py
    image_size: OptionalSize  # side in pixels, or [height, width], that the checkpoint is for; null: as in the .cfg
    up_to_layer: Count | None  # write only layers 0 to up_to_layer - 1, as Darknet's partial command counts
    cfg: str | None  # also write the .cfg that fits the .weights file
    model: ModelConfig  # the network of ``weights``; a checkpoint holds its own


@dataclass
class CompareConfig:
    """Everything that scripts/compare.py reads."""

    runs: list[str]  # run folders, or short names as for ckpt, to compare with the first; one alone: its report
    resamples: Annotated[int, Meta(ge=10)]  # draws of the validation images from which the intervals follow
    seed: Seed  # of the resamples
    debug: bool  # also show the tracebacks of user errors

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("runs is empty. fix: the folders of runs to compare, or of one for its report")


@dataclass
class AnchorsConfig(PluggedConfig):
    """Everything that scripts/anchors.py reads."""

    image_size: ImageSize  # side of the network's input in training in pixels, or [height, width]
    rounds: Whole  # number of rounds of random refinement after k-means
    min_iou: Below1  # recall counts boxes whose IoU with an anchor is higher, as loss.anchor_iou
    out: str | None  # [<folder>/]model/<name>.yaml to write; null: print only
    data: DataConfig
    model: ModelConfig

    def __post_init__(self) -> None:
        if self.out is not None and not PurePath(self.out).match("model/*.yaml"):  # where model= finds it
            raise ValueError(f"out must be [<folder>/]model/<name>.yaml, got {self.out}")


@dataclass
class GetDataConfig:
    """Everything that scripts/get_data.py reads."""

    name: str  # of a public data set: coco2017, voc2007 or voc2012
    root: str | None  # folder to unpack into; null: the set's usual one
    debug: bool  # also show the tracebacks of user errors


@dataclass
class GetWeightsConfig:
    """Everything that scripts/get_weights.py reads."""

    name: str  # of published weights, or list
    debug: bool  # also show the tracebacks of user errors

    def __post_init__(self) -> None:
        if self.name not in ("list", *(names := [entry.name for entry in PUBLISHED])):
            raise ValueError(f"no published weights are called {self.name!r}. fix: list, or one of {', '.join(names)}")


@dataclass
class TuneConfig:
    """Everything that scripts/tune.py reads; what follows ``--`` goes to train.py."""

    name: str  # of the study: its folder is runs/<name>
    trials: Count  # number of trials in the study, those of earlier starts included
    prune_after: Whole  # epochs after which a trial stops if its AP is below the median of the earlier trials
    seed: Seed  # of the search; that of the trainings is train.seed
    options: list[str]  # of train.py, in every trial: what follows --
    debug: bool  # also show the tracebacks of user errors


def section_of(kind: Any) -> type | None:
    """The dataclass in a type hint such as ``DataConfig | None``; None for that of an option."""
    return next((part for part in (kind, *get_args(kind)) if isinstance(part, type) and is_dataclass(part)), None)


@cache
def kinds_of(schema: Any, prefix: str = "") -> dict[str, Any]:
    """The type of every key of a command line, with the keys of all choices."""
    kinds: dict[str, Any] = {}
    for name, kind in get_type_hints(schema).items():
        kinds.setdefault(prefix + name, kind)
        for part in CHOICES.get(prefix + name, {}).values() or filter(None, [section_of(kind)]):
            kinds = kinds_of(part, f"{prefix}{name}.") | kinds
    return kinds
