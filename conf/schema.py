"""Types of the options of all programs, with the meanings that --help shows.

Fields have no defaults: YAML holds every value once, so a missing key fails by its full name.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from enum import StrEnum
from functools import cache
from pathlib import PurePath
from typing import Annotated, Any, get_args, get_type_hints

from msgspec import Meta

from conf import ConfigError, TrainError, install_command
from data.config import AugmentConfig, Below1, Count, DataConfig, Exif, OnBadFile, Resize, Share, Whole, about, must_fit
from data.remote import check_bucket, is_remote
from models.config import (
    PUBLISHED,
    AutoLossConfig,
    LossConfig,
    ModelConfig,
    NotNegative,
    YoloLossConfig,
    YoloxLossConfig,
)

AUTO = "auto"  # of devices, optim.flat_fraction and train.fused_norm
SHORT_TRAINING = 2000  # steps (docs/develop/decisions.md)

Device = StrEnum("Device", "auto cpu cuda")  # auto: CUDA if there is a GPU
# Of the forward pass in training; weights, loss and evaluation: float32, or float64 with float64.
Precision = StrEnum("Precision", "auto float32 tf32 float64 bfloat16 float16")
EvalPrecision = StrEnum("EvalPrecision", "auto float32 tf32 bfloat16 float16")
Compile = StrEnum("Compile", "auto off default")
# sgd: Nesterov momentum, biases start at ten times the rate; darknet: the same without this; adamw:
# Loshchilov and Hutter 2019.
Optimizer = StrEnum("Optimizer", "sgd darknet adamw")
OPTIMISERS: dict[str, Callable[..., Any]] = {}  # of plugins, by name: (parameter groups, rate) -> torch optimiser
Decay = StrEnum("Decay", "cosine linear constant")

# Limits that conf/compose.py checks, as it prints them.
Seed = Annotated[int, Meta(ge=0, le=4294967295)]
Positive = Annotated[float, Meta(gt=0)]
SIZE = "a number of pixels or [height, width]"
ImageSize = Annotated[Any, Meta(title=SIZE)]
OptionalSize = Annotated[Any, Meta(title=f"{SIZE}, or null")]
MAX_SIDE = 2**16  # pixels


def is_image_size(size: Any) -> bool:
    """Whether the value of an option is a side in pixels or [height, width]."""
    sides = size if isinstance(size, list) else [size] * 2
    return len(sides) == 2 and {*map(type, sides)} == {int} and 0 < min(sides) <= max(sides) < MAX_SIDE


def check_devices(devices: Any) -> None:
    """Raise ValueError unless ``devices`` is a number of processes, auto or null."""
    if devices not in (None, AUTO) and not (type(devices) is int and 1 <= devices <= 1024):
        says = f"devices must be a number of processes up to 1024, or auto for one on each GPU, got {devices}"
        raise ValueError(f"{says}; the environment variable CUDA_VISIBLE_DEVICES chooses the GPUs")


@dataclass
class TrainSection:
    """The training loop (keys ``train.*``)."""

    epochs: Count = about("passes over the training set")
    batch_size: Count = about("images in one optimiser step, over all ranks")
    micro_batch_size: Count | None = about("""images in one forward pass, over all ranks; gradient
        accumulation completes the batch. It must divide batch_size and be a multiple of the ranks. null: the
        whole batch""")
    image_size: ImageSize = about("side of the square training images in pixels, or [height, width]")
    multi_scale: list[float] = about("""[low, high]: each step draws its image size from low to high times
        image_size; the first step has the largest""")
    rect: bool = about("group images of similar aspect ratio and fill a rectangle instead of a square")
    repeat_threshold: Share = about("repeat images of classes that fewer than this share of the images show; 0: none")
    seed: Seed = about("of the initial weights, the order of the images and their augmentation")
    precision: Precision = about("""of the forward pass; auto: bfloat16 if all ranks have it, else float16 on
        GPUs with tensor cores, else float32; a resumed run keeps its choice. tf32: float32 with factors of 11
        bits, on GPUs that have it""")
    compile: Any = about("""off, default: by torch.compile, each image size once; auto: on GPUs with Triton
        and a C++ compiler, if all images have one size and the training is long enough to gain by it""")
    sync_bn: bool = about("batch-norm statistics over all ranks")
    fused_norm: Any = about("""auto, true or false: batch norm and activation in one pass by kernels in
        Triton, on GPUs, with train.compile off; auto: on one GPU, in half precision, for batches large enough
        to gain by it""")
    deterministic: bool = about("""same bits in every run on the same number of ranks, by torch's
        deterministic algorithms""")
    save_every_steps: Whole = about("also write last.pt within an epoch, after this many steps; 0: not by steps")
    save_every_minutes: NotNegative = about("""also write last.pt within an epoch, after this many minutes; 0:
        not by time""")
    patience: Whole = about("stop after this many epochs without a better AP; 0: never")
    timeout_seconds: Positive = about("how long a rank waits for the others in an exchange, and for a batch")

    def __post_init__(self) -> None:
        mode = "off" if self.compile is False else self.compile  # YAML reads off as false
        if mode not in tuple(Compile):
            raise ValueError(f"train.compile must be one of {', '.join(Compile)}, got {mode}")
        self.compile = Compile(mode)
        if len(self.multi_scale) != 2 or not 0 < self.multi_scale[0] <= self.multi_scale[1]:
            raise ValueError(f"train.multi_scale must be [low, high] with 0 < low <= high, got {self.multi_scale}")
        must_fit(max(self.batch_size, 0), self.micro_batch_size or 1, 1)  # less than 1 is told as such
        if self.rect and isinstance(self.image_size, list):
            raise ConfigError("train.rect=true chooses height and width itself", "train.image_size=<longest side>")
        if type(self.fused_norm) is not bool and self.fused_norm != AUTO:
            raise ValueError(f"train.fused_norm must be {AUTO}, true or false, got {self.fused_norm}")


@dataclass
class OptimConfig:
    """Settings of the optimiser, its schedule and the weight average (keys ``optim.*``)."""

    name: Optimizer | str = about("follows from optim=<choice>; text: that of a plugin")
    lr: Positive = about("learning rate after warm-up, for a loss averaged over the global batch")
    final_lr_ratio: Share = about("learning rate of the last step / lr")
    decay: Decay = about("how the learning rate falls after warm-up")
    flat_fraction: Any = about("""share of the training after which it begins to fall; auto: 0.5 up to 2000
        steps, else 0""")
    momentum: Below1 = about("of SGD (Nesterov); beta1 of AdamW")
    weight_decay: NotNegative = about("""on convolution weights only; AdamW shrinks them by lr times this
        share in each step""")
    warmup_epochs: NotNegative = about("""length of the warm-up in epochs, at least 500 steps and at most a
        tenth of the training; 0: none""")
    clip_norm: Positive | None = about("largest gradient norm; null: no clipping")
    ema_decay: Share = about("""largest decay of the weight average in a step; 0: no average. Before it limits
        the average, that covers about 8 % of the steps made""")

    def flat_share(self, steps: int) -> float:
        """``flat_fraction`` as a number, for a training of ``steps``."""
        if self.flat_fraction == AUTO:
            return 0.5 if steps <= SHORT_TRAINING else 0.0
        return float(self.flat_fraction)

    def __post_init__(self) -> None:
        if self.name not in (names := (*Optimizer, *OPTIMISERS)):
            raise ValueError(f"optim.name must be {', '.join(names)}, or one that plugins= add, got {self.name}")
        flat = self.flat_fraction
        if flat != AUTO and not (type(flat) in (int, float) and 0 <= flat < 1):
            raise ValueError(f"optim.flat_fraction must be {AUTO} or lie in 0..1, below 1, got {flat}")


@dataclass
class LoggerConfig:
    """What a run draws and logs, and to which services (keys ``logger.*``)."""

    pictures: bool = about("draw the first training batch, the curves and detections into the run folder")
    every_steps: Whole = about("steps between two rows of steps.csv and two points of the services; 0: none")
    tensorboard: bool = about("write event files into tensorboard/ of the run folder")
    wandb: bool = about("log to Weights & Biases, in the project that has the run's name")

    def __post_init__(self) -> None:
        for name in self.services:
            if not is_installed(name):
                raise TrainError(f"logger={name} is not installed", f"{install_command(name)}, or leave {name} out")

    @property
    def services(self) -> list[str]:
        """The chosen loggers besides CSV, by the names of their modules and extras."""
        return ["tensorboard"] * self.tensorboard + ["wandb"] * self.wandb


@dataclass
class DetectionSection:
    """How images become detections, in evaluation and in prediction."""

    image_size: OptionalSize = about("longest side in pixels, or [height, width]; null: as trained, or as in the .cfg")
    resize: Resize = about("letterbox: keep the aspect ratio and pad; stretch: fill image_size, as Darknet does")
    rect: bool = about("letterbox each image into a rectangle of its shape; false, or resize=stretch: into image_size")
    precision: EvalPrecision = about("""of the forward pass; all but float32 round more and are faster on
        GPUs; auto: float32, in a training, too, so that one precision chooses best.pt""")
    confidence: Share = about("drop detections with this score or less")
    nms_iou: Share = about("a box suppresses those of its class that overlap it by more than this IoU")
    merge_nms: bool = about("replace each kept box by the mean of itself and those it suppresses, weighted by score")
    max_detections: Count = about("per image")


Scorer = StrEnum("Scorer", "auto pycocotools hotcoco")


@dataclass
class EvaluateConfig(DetectionSection):
    """How a model is scored (keys ``evaluate.*``)."""

    batch_size: Count = about("""images in one forward pass of one rank; another number moves scores by
        rounding, some 2e-6""")
    clip: bool = about("cut boxes at the image edges")
    scorer: Scorer = about("computes the same metrics, to the bit; auto: hotcoco, which is faster, in a tested version")
    every: Whole = about("epochs between evaluations in training; 0: only after the last epoch")
    multi_label = True  # not an option: each class has its own AP, so a box counts for each class above confidence

    def is_due(self, epoch: int, epochs: int) -> bool:
        """Whether to evaluate after ``epoch`` (from 1): always after the last of the ``epochs``."""
        return epoch == epochs or (self.every > 0 and epoch % self.every == 0)


@dataclass
class PluggedConfig:
    """Options of all programs that plugins can extend."""

    debug: bool = about("also show the tracebacks of user errors")
    plugins: list[str] = about("""Python files that add losses, layers, augmentations and more: see
        docs/develop/extending.md""")


@dataclass(kw_only=True)
class TrainConfig(PluggedConfig):
    """Everything that train.py reads."""

    name: str = about("folder below runs/")
    run_dir: str | None = about("null: runs/<name>/<date_time>, under SLURM runs/<name>/slurm-<job id>[-<number>]")
    run_mirror: str | None = about("address such as s3://bucket/runs/coco: what a resume needs is copied there, too")
    resume: str | None = about("""run folder, its last.pt, a folder of runs (the newest), last (of all), or a
        run_mirror; auto: that in run_mirror unless it is here, else run_dir, else this job's (SLURM,
        torchrun), else the newest of this name""")
    device: Device = about("auto: CUDA if there is a GPU")
    devices: Any = about("number of processes to start, one for each GPU, or auto (all GPUs); null: only this one")
    data: DataConfig
    model: ModelConfig
    augment: AugmentConfig
    loss: LossConfig = about("""one of CHOICES["loss"]""")
    optim: OptimConfig
    train: TrainSection
    evaluate: EvaluateConfig
    logger: LoggerConfig

    def __post_init__(self) -> None:
        check_devices(self.devices)
        if self.run_mirror is not None:
            check_bucket(self.run_mirror, "run_mirror")
        if self.resume is not None and self.run_dir is not None and not is_remote(self.resume):
            raise ConfigError("resume continues in its own folder", "leave run_dir out")
        if self.train.patience > 0 and self.evaluate.every == 0:
            raise ConfigError("train.patience has no AP to follow with evaluate.every=0", "evaluate.every=1")
        self.data.check_two_sets()


# Sections whose keys depend on a choice: the class of each choice, by the `name` in its YAML.
CHOICES: dict[str, dict[str, type]] = {
    "loss": {"auto": AutoLossConfig, "yolov3": YoloLossConfig, "yolox": YoloxLossConfig, "darknet": LossConfig}
}


EvalSplit = StrEnum("EvalSplit", "val test train")


@dataclass(kw_only=True)
class EvalConfig(PluggedConfig):
    """Everything that eval.py reads; the checkpoint fills in ``data`` and ``model``."""

    ckpt: str | None = about("a .pt file, a run folder (its best.pt), a folder of runs (the newest), last (of all)")
    split: EvalSplit = about("""val; train, to compare; test: what data.yaml has under test, else what is
        called test where data.val says val""")
    model_file: str | None = about("a file of export.py to score; then ckpt only says on which data")
    detections: str | None = about("a COCO results file of any system, to score instead of a network")
    out: str | None = about("""folder for scores and detections as JSON, and for plots; null: print only, or
        runs/eval/<date_time> with plots""")
    plots: bool = about("draw precision and recall, confusions and the first images into the folder plots of out")
    device: Device = about("auto: CUDA if there is a GPU")
    devices: Any = about("as in train.py")
    timeout_seconds: Positive = about("as train.timeout_seconds")
    data: DataConfig
    model: ModelConfig | None
    evaluate: EvaluateConfig

    def __post_init__(self) -> None:
        check_devices(self.devices)


@dataclass(kw_only=True)
class TrainedConfig(PluggedConfig):
    """A trained network: ``ckpt``, or ``model`` with model.weights and ``names``."""

    ckpt: str | None = about("a .pt file, a run folder (its best.pt), a folder of runs (the newest), last (of all)")
    model: ModelConfig | None
    names: str | None = about("""class names for Darknet weights: a text file with one per line, or a COCO
        json; null: COCO's for 80 classes, else numbers""")

    def __post_init__(self) -> None:
        if self.ckpt is not None and self.names is not None:
            raise ConfigError("ckpt and names exclude one another: a checkpoint knows its classes", "leave one out")


@dataclass(kw_only=True)
class DetectConfig(DetectionSection, TrainedConfig):
    """A detector and what it reports."""

    multi_label: bool = about("report a box once for each class above confidence")
    classes: Any = about("report only these, by name or number, as in [person,3]; null: all")
    exif: Exif = about("apply: turn images upright by their EXIF tag; ignore: read them as stored")
    device: Device = about("auto: CUDA if there is a GPU")
    workers: Count = about("threads that read images")


@dataclass(kw_only=True)
class PredictConfig(DetectConfig):
    """Everything that predict.py reads: ``ckpt``, or ``model`` with weights and ``names``."""

    on_error: OnBadFile = about("stop at a file that cannot be read, or skip it with a warning")
    batch_size: Count | None = about("""images in one forward pass; results differ by rounding only; null: 8
        on a GPU, else 1""")
    source: str = about("""an image, a video, a folder, a quoted pattern, an address (http://.../a.jpg,
        rtsp://...), or the number of a camera (0)""")
    out: str | None = about("folder for the results; null: runs/predict/<date_time>")
    draw: bool = about("write copies of the images and videos with boxes")
    save_json: bool = about("write detections.json (COCO results) and images.json")
    save_txt: bool = about("write labels/*.txt of images (YOLO)")


ExportFormat = StrEnum("ExportFormat", "onnx openvino torch")
ExportPrecision = StrEnum("ExportPrecision", "float32 float16 int8")
ExportCheck = StrEnum("ExportCheck", "boxes ap")


@dataclass(kw_only=True)
class ExportConfig(TrainedConfig):
    """Everything that export.py reads: ``ckpt``, or ``model`` with weights and ``names``."""

    format: ExportFormat = about("onnx, openvino (.xml and .bin), or torch: the network as a .pt2 of torch.export")
    precision: ExportPrecision = about("of the network in the file; int8: its convolutions but the last, not for torch")
    symmetric: bool = about("int8 around zero for values, too, as TensorRT wants them; costs some accuracy")
    calibration: Count = about("training images from which int8 takes the ranges of values")
    check: ExportCheck = about("""boxes: compare the file's with the network's; ap: also score both on the
        validation images""")
    max_drop: NotNegative | None = about("""with check=ap, refuse a file that loses more AP; null: 0.02 for
        int8, else 0.005""")
    licence: str | None = about("of the weights, for the file's metadata")
    out: str | None = about("the file to write; null: beside the weights, as <name>.onnx, <name>.xml or <name>.pt2")
    image_size: OptionalSize = about("side in pixels or [height, width]; null: as evaluated, or as in the .cfg")
    batch_size: Annotated[int, Meta(ge=1, le=65536)] = about("images in one call of the exported network")
    dynamic_batch: bool = about("accept any batch size")
    dynamic_size: bool = about("accept any multiples of the network's stride as height and width")
    nms: bool = about("output detections instead of all boxes and scores")
    confidence: Share = about("with nms: drop detections with this score or less")
    nms_iou: Share = about("a box suppresses those of its class that overlap it by more than this IoU")
    max_detections: Count = about("per image, with nms")
    data: DataConfig | None = about("for precision=int8 and check=ap; null: that of the checkpoint")
    evaluate: EvaluateConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format is ExportFormat.torch and self.precision is ExportPrecision.int8:
            raise ConfigError("format=torch has no int8", "format=onnx or format=openvino")
        if self.format is ExportFormat.openvino and self.nms:
            raise ConfigError("format=openvino has no nms", "nms=false, or format=onnx")


@dataclass(kw_only=True)
class CheckDataConfig(PluggedConfig):
    """Everything that scripts/check_data.py reads."""

    image_size: ImageSize = about("side of the network's input in training in pixels, or [height, width]")
    min_iou: Below1 = about("recall counts boxes whose IoU with an anchor is higher, as loss.anchor_iou")
    split: EvalSplit | None = about("the set to check alone: train, val or test; null: all there are")
    pictures: Whole = about("images of each set on the contact sheet; 0: draw nothing")
    out: str | None = about("folder for the report; null: runs/check_data/<name>_<date_time>")
    data: DataConfig
    model: ModelConfig

    def __post_init__(self) -> None:
        self.data.check_two_sets()


@dataclass
class ConvertConfig(PluggedConfig):
    """Everything that scripts/convert_weights.py reads: ``weights`` or ``ckpt`` to convert."""

    weights: str | None = about("Darknet .weights, or a .pt state dict of another system, for the network of ``model``")
    ckpt: str | None = about("a .pt file, a run folder (its best.pt), a folder of runs (the newest), last (of all)")
    out: str = about("from weights: a .pt checkpoint; from ckpt, or with up_to_layer: Darknet .weights")
    names: str | None = about("""class names for weights: a text file with one per line, or a COCO json; null:
        as in predict.py""")
    image_size: OptionalSize = about("""side in pixels, or [height, width], that the checkpoint is for; null:
        as in the .cfg""")
    up_to_layer: Count | None = about("write only layers 0 to up_to_layer - 1, as Darknet's partial command counts")
    cfg: str | None = about("also write the .cfg that fits the .weights file")
    model: ModelConfig = about("the network of ``weights``; a checkpoint holds its own")


@dataclass
class CompareConfig:
    """Everything that scripts/compare.py reads."""

    runs: list[str] = about("run folders, or short names as for ckpt, to compare with the first; one alone: its report")
    resamples: Annotated[int, Meta(ge=10)] = about("draws of the validation images from which the intervals follow")
    seed: Seed = about("of the resamples")
    debug: bool = about("also show the tracebacks of user errors")

    def __post_init__(self) -> None:
        if not self.runs:
            raise ConfigError("runs is empty", "the folders of runs to compare, or of one for its report")


@dataclass(kw_only=True)
class AnchorsConfig(PluggedConfig):
    """Everything that scripts/anchors.py reads."""

    image_size: ImageSize = about("side of the network's input in training in pixels, or [height, width]")
    rounds: Whole = about("number of rounds of random refinement after k-means")
    min_iou: Below1 = about("recall counts boxes whose IoU with an anchor is higher, as loss.anchor_iou")
    out: str | None = about("[<folder>/]model/<name>.yaml to write; null: print only")
    data: DataConfig
    model: ModelConfig

    def __post_init__(self) -> None:
        if self.out is not None and not PurePath(self.out).match("model/*.yaml"):  # where model= finds it
            raise ValueError(f"out must be [<folder>/]model/<name>.yaml, got {self.out}")


@dataclass
class GetDataConfig:
    """Everything that scripts/get_data.py reads."""

    name: str = about("of a public data set: coco2017, voc2007 or voc2012")
    root: str | None = about("folder to unpack into; null: the set's usual one")
    debug: bool = about("also show the tracebacks of user errors")


@dataclass
class GetWeightsConfig:
    """Everything that scripts/get_weights.py reads."""

    name: str = about("of published weights, or list")
    debug: bool = about("also show the tracebacks of user errors")

    def __post_init__(self) -> None:
        if self.name not in ("list", *(names := [entry.name for entry in PUBLISHED])):
            raise ConfigError(f"no published weights are called {self.name!r}", f"list, or one of {', '.join(names)}")


@dataclass
class TuneConfig:
    """Everything that scripts/tune.py reads; what follows ``--`` goes to train.py."""

    name: str = about("of the study: its folder is runs/<name>")
    trials: Count = about("number of trials in the study, those of earlier starts included")
    prune_after: Whole = about("epochs after which a trial stops if its AP is below the median of the earlier trials")
    seed: Seed = about("of the search; that of the trainings is train.seed")
    options: list[str] = about("of train.py, in every trial: what follows --")
    debug: bool = about("also show the tracebacks of user errors")


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


def require(module: str, what: str) -> Any:
    """Import ``module``, or raise ConfigError with the command that installs it."""
    if not is_installed(module):
        raise ConfigError(f"{what} needs {module}, which is not installed", install_command(module))
    return importlib.import_module(module)


def is_installed(module: str) -> bool:
    """Whether a module can be imported; a folder such as wandb/ that a run left does not count."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None
