"""Data sets: from annotation files and images to batches of network input."""

from data.annotations import Annotations, check_same_classes, open_annotations
from data.config import AugmentConfig, DataConfig, DataFormat, ImageCache, OnError, ShapesConfig, SplitConfig
from data.dataset import Batch, EvalDataset, Request, TrainDataset
from data.errors import DataError
from data.images import ImageSource
from data.loader import make_loader
from data.ram_cache import RamCache, build_ram_cache
from data.samplers import (
    EvalBatchSampler,
    MultiScale,
    TrainBatchSampler,
    eval_batches,
    fitting_device_batch_size,
)
from data.shapes import ensure_shapes
from data.transforms import Letterbox, letterbox

__all__ = [
    "Annotations",
    "AugmentConfig",
    "Batch",
    "DataConfig",
    "DataError",
    "DataFormat",
    "EvalBatchSampler",
    "EvalDataset",
    "ImageCache",
    "ImageSource",
    "Letterbox",
    "MultiScale",
    "OnError",
    "RamCache",
    "Request",
    "ShapesConfig",
    "SplitConfig",
    "TrainBatchSampler",
    "TrainDataset",
    "build_ram_cache",
    "check_same_classes",
    "ensure_shapes",
    "eval_batches",
    "fitting_device_batch_size",
    "letterbox",
    "make_loader",
    "open_annotations",
]
