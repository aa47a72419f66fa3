"""Darknet YOLO networks: built from .cfg files, their loss, their decoding and their weights."""

from models.boxes import IouKind
from models.cfg.edit import fitted_cfg, with_anchors
from models.cfg.parse import Cfg, load_cfg, parse_cfg, zoo_cfg
from models.decode import Postprocess, decode
from models.errors import ModelError
from models.loss.darknet import DarknetLoss, DarknetLossConfig
from models.loss.yolo import LossConfig, LossParts, LossSection, YoloLoss
from models.network.darknet import Darknet, count_flops, count_parameters
from models.network.heads import Head
from models.weights.darknet import load_darknet_weights, save_darknet_weights
from models.weights.file import WEIGHTS_VERSION
from models.weights.foreign import load_foreign_state_dict
from models.weights.report import WeightsReport
from models.weights.state_dicts import load_weights_of_checkpoint, read_tensor_file

__all__ = [
    "WEIGHTS_VERSION",
    "Cfg",
    "Darknet",
    "DarknetLoss",
    "DarknetLossConfig",
    "Head",
    "IouKind",
    "LossConfig",
    "LossParts",
    "LossSection",
    "ModelError",
    "Postprocess",
    "WeightsReport",
    "YoloLoss",
    "count_flops",
    "count_parameters",
    "decode",
    "fitted_cfg",
    "load_cfg",
    "load_darknet_weights",
    "load_foreign_state_dict",
    "load_weights_of_checkpoint",
    "parse_cfg",
    "read_tensor_file",
    "save_darknet_weights",
    "with_anchors",
    "zoo_cfg",
]
