"""The networks that detect: Darknet as trained, or an exported ONNX file in its place."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from models.export.files import open_onnx
from models.export.graph import fuse_batch_norm
from models.export.metadata import Exported
from models.network.darknet import Darknet
from models.network.heads import Head


class OnnxNetwork(nn.Module):
    """A file of export.py that onnxruntime computes on the CPU; threads may share it.

    heads: none, as the file decodes its raw maps: models.decode passes its boxes and scores on.
    max_stride, num_classes, nearest_size: as of Darknet.
    """

    heads: Sequence[Head] = ()

    def __init__(self, exported: Exported) -> None:
        super().__init__()
        self.max_stride, self.num_classes = exported.stride, len(exported.names)
        self._batch_size = exported.batch_size
        # One thread for each call, so that any number of cores gives the same bits.
        self._run = open_onnx(exported.path, threads=1)

    def nearest_size(self, height: int, width: int) -> tuple[int, int]:
        """The (height, width) of images, in pixels, nearest to these that the strides allow."""
        step = self.max_stride
        return max(step, round(height / step) * step), max(step, round(width / step) * step)

    def forward(self, images: Tensor) -> list[Tensor]:
        """All boxes_xyxy (B, n, 4) and scores (B, n, classes) of images as Darknet takes them.

        A file with a fixed batch size gets such batches, the last one filled up with black. Raises
        ModelError if the file fails on images of this size.
        """
        parts = []
        for part in images.split(self._batch_size or len(images)):
            missing = (self._batch_size or len(part)) - len(part)
            outputs = self._run(nn.functional.pad(part, (0, 0, 0, 0, 0, 0, 0, missing)))
            parts.append([output[: len(part)] for output in outputs])
        return [torch.cat(column) for column in zip(*parts, strict=True)]


AnyNetwork = Darknet | OnnxNetwork
Network = TypeVar("Network", Darknet, OnnxNetwork, AnyNetwork)


def for_detection(model: Network, device: torch.device) -> Network:
    """``model`` as it detects fastest on the device that it is on.

    On a GPU that is a copy with batch norm in the convolutions, in channels_last memory. On a CPU
    it is the model itself, whose figures are kept to the last bit.
    """
    if device.type == "cpu":
        return model
    assert isinstance(model, Darknet), "an exported network runs on the CPU"
    return fuse_batch_norm(model).to(memory_format=torch.channels_last)
