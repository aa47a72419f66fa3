"""Darknet YOLO networks: built from .cfg files, their loss, their decoding and their weights."""

from models.boxes import IouKind
from models.cfg import Cfg, load_cfg, parse_cfg, zoo_cfg
from models.darknet import Darknet, count_flops, count_parameters
from models.decode import Postprocess, decode
from models.errors import ModelError
from models.graph import Head
from models.loss import LossConfig, LossParts, YoloLoss
from models.state_dicts import load_weights_of_checkpoint
from models.weights import WeightsReport, load_darknet_weights

__all__ = [
    "Cfg",
    "Darknet",
    "Head",
    "IouKind",
    "LossConfig",
    "LossParts",
    "ModelError",
    "Postprocess",
    "WeightsReport",
    "YoloLoss",
    "count_flops",
    "count_parameters",
    "decode",
    "load_cfg",
    "load_darknet_weights",
    "load_weights_of_checkpoint",
    "parse_cfg",
    "zoo_cfg",
]
