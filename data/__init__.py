"""Data sets: from annotation files and images to batches of network input."""

from data.audit.summary import summarise
from data.augment_config import AugmentConfig, Colour
from data.batches.frame_batches import FrameBatch, FrameBatches
from data.batches.loader import make_loader
from data.batches.multi_scale import MultiScale
from data.batches.orders import repeat_factors
from data.batches.samplers import (
    EvalBatchSampler,
    TrainBatchSampler,
    eval_batches,
    fitting_device_batch_size,
)
from data.config import (
    DataConfig,
    DataFormat,
    Exif,
    ImageCache,
    OnBadFile,
    OnError,
    Resize,
    ShapesConfig,
    SplitConfig,
)
from data.errors import DataError
from data.formats.shapes import ensure_shapes
from data.images.cache import CachedImages, build_image_cache, kept_cache_name
from data.images.media import Frame, Medium, Video, find_media
from data.images.source import ImageSource
from data.index.annotations import Annotations, check_same_classes, open_annotations
from data.index.classes import read_names
from data.samples.batch import Batch
from data.samples.dataset import EvalDataset, TrainDataset
from data.samples.letterbox import Letterbox, cut_at_edges, letterbox
from data.samples.plan import Request

__all__ = [
    "Annotations",
    "AugmentConfig",
    "Batch",
    "CachedImages",
    "Colour",
    "DataConfig",
    "DataError",
    "DataFormat",
    "EvalBatchSampler",
    "EvalDataset",
    "Exif",
    "Frame",
    "FrameBatch",
    "FrameBatches",
    "ImageCache",
    "ImageSource",
    "Letterbox",
    "Medium",
    "MultiScale",
    "OnBadFile",
    "OnError",
    "Request",
    "Resize",
    "ShapesConfig",
    "SplitConfig",
    "TrainBatchSampler",
    "TrainDataset",
    "Video",
    "build_image_cache",
    "check_same_classes",
    "cut_at_edges",
    "ensure_shapes",
    "eval_batches",
    "find_media",
    "fitting_device_batch_size",
    "kept_cache_name",
    "letterbox",
    "make_loader",
    "open_annotations",
    "read_names",
    "repeat_factors",
    "summarise",
]
